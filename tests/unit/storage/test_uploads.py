"""Multipart uploads that were never completed are all found: a server tells a thousand at a time."""

from __future__ import annotations

from typing import Any, cast

from swift_ft.storage.remote import S3Files

PAGE = 2


class Bucket:
    """A server of which a page has two entries.

    Args:
        sizes: of the parts of each upload, by key.
    """

    def __init__(self, sizes: dict[str, list[int]]) -> None:
        self.sizes = sizes

    @staticmethod
    def split_path(path: str) -> tuple[str, str, None]:
        """The bucket, and the key."""
        bucket, _, key = path.partition("/")
        return bucket, key, None

    def call_s3(self, operation: str, **fields: Any) -> dict[str, Any]:
        """One request."""
        if operation == "abort_multipart_upload":
            del self.sizes[fields["Key"]]
            return {}
        if operation == "list_parts":
            begin = int(fields.get("PartNumberMarker", 0))
            sizes = self.sizes[fields["Key"]]
            page = [{"Size": size} for size in sizes[begin : begin + PAGE]]
            more = begin + PAGE < len(sizes)
            return {
                "Parts": page,
                "IsTruncated": more,
                **({"NextPartNumberMarker": begin + PAGE} if more else {}),
            }
        keys = sorted(key for key in self.sizes if key.startswith(fields["Prefix"]))
        keys = [key for key in keys if (key, f"id of {key}") > self._marker(fields)]
        uploads = [{"Key": key, "UploadId": f"id of {key}"} for key in keys[:PAGE]]
        told: dict[str, Any] = {"Uploads": uploads, "IsTruncated": len(keys) > PAGE}
        if told["IsTruncated"]:
            told |= {"NextKeyMarker": uploads[-1]["Key"], "NextUploadIdMarker": uploads[-1]["UploadId"]}
        return told

    @staticmethod
    def _marker(fields: dict[str, Any]) -> tuple[str, str]:
        return fields.get("KeyMarker", ""), fields.get("UploadIdMarker", "")


def test_all_pages_are_read() -> None:
    bucket = Bucket({f"run/log/{i}": [8] * i for i in range(1, 6)} | {"other/1": [8]})
    files = S3Files(cast(Any, bucket))
    assert files.abandoned_uploads("bucket/run/log") == {str(i): 8 * i for i in range(1, 6)}
    assert files.abort_abandoned_uploads("bucket/run") == 5
    assert bucket.sizes == {"other/1": [8]}


def test_a_page_that_comes_again_is_the_last() -> None:
    """A server that does not know how to go on says the same for ever."""

    class Same(Bucket):
        """It takes no marker."""

        @staticmethod
        def _marker(fields: dict[str, Any]) -> tuple[str, str]:
            return "", ""

    files = S3Files(cast(Any, Same({f"run/{i}": [8] for i in range(5)})))
    assert set(files.abandoned_uploads("bucket/run")) == {"0", "1"}
