"""Files behind a network: object stores that speak S3, HDFS, and whatever else fsspec knows.

All may be called again after a failure that may have been none (the answer got lost). Nothing retries here:
:class:`swift_ft.logging.store.Store` does.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

from swift_ft.logging.files import Files
from swift_ft.logging.hdfs import hdfs_class

__all__ = ["HdfsFiles", "RemoteFiles", "S3Files", "remote_files"]

_SMALL_BYTES = 1 << 20
_PART_BYTES = 8 << 20  # of an upload: what is sent again when a connection breaks
_PARTS_AT_ONCE = 4
_WRITER = "swift-ft-writer"


def remote_files(fs: Any) -> Files:
    """The class that knows a filesystem's peculiarities."""
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    if "memory" in protocols:
        return Files(fs)
    if "s3" in protocols:
        return S3Files(fs)
    native = hdfs_class()
    return HdfsFiles(fs) if native is not None and isinstance(fs, native) else RemoteFiles(fs)


class RemoteFiles(Files):
    """A filesystem behind a network of which nothing further is known."""

    fetched = True

    def open_source(self, path: str) -> pa.NativeFile:
        """Brings a file here and maps it. Its copy has no name, so that nothing is left whoever dies."""
        if self.fs.size(path) <= _SMALL_BYTES:
            return pa.BufferReader(self.fs.cat_file(path))
        with tempfile.NamedTemporaryFile(prefix="swift-ft-") as copy:
            self.fs.get_file(path, copy.name)
            return pa.memory_map(copy.name, "r")


class S3Files(RemoteFiles):
    """An object store: no directories, no rename, and an object appears when it is complete."""

    def make_parent(self, path: str) -> None:
        """Nothing: there are no directories, and a bucket that is absent is not ours to make."""

    def upload(self, local: Path, temporary: str, path: str) -> None:
        """Several parts at once."""
        self.fs.put_file(str(local), path, chunksize=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)

    def put(self, temporary: str, path: str, data: bytes) -> None:
        """One request, which replaces the object or does not."""
        self.fs.pipe_file(path, data)

    def create(self, temporary: str, path: str, data: bytes) -> None:
        """A conditional request."""
        writer = temporary.rpartition("/")[2].split(".")[-2]  # the random part of the name
        try:
            self.fs.pipe_file(path, data, mode="create", Metadata={_WRITER: writer})
        except OSError as error:
            # The client repeats a request whose answer got lost, and then our own object is in the way.
            # SeaweedFS's refusal has a code that the client does not know: what is there tells it.
            owner = self._writer_of(path)
            if owner is None:
                raise
            if owner != writer:
                raise FileExistsError(path) from error

    def exists(self, path: str) -> bool:
        """True if there is such an object, or one below."""
        return bool(self.fs.isfile(path)) or bool(self.list(path))

    def list(self, directory: str) -> list[str]:
        """First parts of all names below.

        Not what the server calls a directory: SeaweedFS keeps those that are empty.
        """
        prefix = f"{directory.rstrip('/')}/"
        below = (path for path in self.fs.find(prefix) if path.startswith(prefix))
        return list({path.removeprefix(prefix).partition("/")[0] for path in below})

    def abandoned(self, directory: str) -> int:
        """Uploads of several parts that nobody will complete."""
        bucket, prefix, _ = self.fs.split_path(directory)
        below = f"{prefix}/" if prefix else ""
        pages = self.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=below)
        uploads = pages.get("Uploads", [])
        for upload in uploads:
            self.fs.call_s3(
                "abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
            )
        return len(uploads)

    def _writer_of(self, path: str) -> str | None:
        """Who created an object; None if there is none."""
        try:
            return str(self.fs.metadata(path, refresh=True).get(_WRITER, ""))
        except FileNotFoundError:
            return None


class HdfsFiles(RemoteFiles):
    """HDFS: files grow under the reader's eyes, and renames are atomic."""

    def rename(self, source: str, destination: str) -> None:
        """Replaces the destination in one step."""
        try:
            self.fs.mv(source, destination, overwrite=True)
        except FileNotFoundError:
            # Done before, by a call whose answer got lost?
            if not self.fs.exists(destination):
                raise

    def stage(self, temporary: str, data: bytes) -> None:
        """Writes the content, under another name."""
        self.fs.pipe_file(temporary, data)

    def create(self, temporary: str, path: str, data: bytes) -> None:
        """A rename that does not replace."""
        try:
            self.fs.mv(temporary, path, overwrite=False)
        except FileExistsError:
            # A temporary file that is no more was renamed, by a call whose answer got lost.
            if self.fs.exists(temporary):
                self.fs.rm_file(temporary)
                raise
        except FileNotFoundError:
            if not self.fs.exists(path):
                raise
