"""The suite on a real S3 server, and what is peculiar to such stores."""

from __future__ import annotations

import io
import os
import traceback
import uuid
from typing import Any

import pytest
from seaweed import BUCKET, SECRET_KEY, SeaweedServer

from swift_ft.errors import StoreNotWritableError
from swift_ft.logging import Store
from swift_ft.recovery.checkpoint import CheckpointFolder
from swift_ft.testing import LogStoreTests


class TestS3Store(LogStoreTests):
    @pytest.fixture
    def url(self, seaweed: SeaweedServer) -> str:
        return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def test_wrong_credentials_are_told_and_not_shown(
    seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = f"{SECRET_KEY}-but-wrong"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong)
    with pytest.raises(StoreNotWritableError, match="cannot be written") as caught:
        Store(f"s3://{BUCKET}/x").probe()
    assert wrong not in "".join(traceback.format_exception(caught.value))


def test_a_create_whose_answer_was_lost_still_won(seaweed: SeaweedServer) -> None:
    """The client repeats it, and finds its own object in the way."""
    store = Store(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    mine, path = store._absolute("claim.json.0123456789ab.tmp"), store._absolute("claim.json")
    for _ in range(2):
        store._files.create(mine, path, b"{}")
    with pytest.raises(FileExistsError):
        store._files.create(store._absolute("claim.json.ba9876543210.tmp"), path, b"{}")


def half_uploaded(client: Any, key: str) -> None:
    """As a process that is killed leaves it."""
    upload = client.call_s3("create_multipart_upload", Bucket=BUCKET, Key=key)
    part = io.BytesIO(os.urandom(5 << 20))
    client.call_s3(
        "upload_part", Bucket=BUCKET, Key=key, UploadId=upload["UploadId"], PartNumber=1, Body=part
    )


def half_uploads(client: Any, name: str) -> list[str]:
    uploads = client.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads", [])
    return [upload["Key"].removeprefix(f"{name}/") for upload in uploads if name in upload["Key"]]


def test_a_half_uploaded_segment_of_a_dead_writer_is_swept(seaweed: SeaweedServer) -> None:
    """No listing shows it, and it is paid for until somebody aborts it."""
    name = uuid.uuid4().hex
    client = seaweed.client()
    for directory in ("log", "other"):
        half_uploaded(client, f"{name}/{directory}/g00001-s000000.arrow")
    Store(f"s3://{BUCKET}/{name}").sweep("log")
    assert half_uploads(client, name) == ["other/g00001-s000000.arrow"]


def test_half_uploaded_parts_go_with_their_checkpoint(seaweed: SeaweedServer) -> None:
    """Of failed attempts beside a commit, and of what never became a checkpoint; not of one to come."""
    name = uuid.uuid4().hex
    client = seaweed.client()
    folder = CheckpointFolder(Store(f"s3://{BUCKET}/{name}"))
    for iteration in (10, 20, 30):
        half_uploaded(client, f"{name}/{folder.part(iteration, 0, 1)}/__0_0.distcp")
    folder.store.write_json(f"{folder.part(10, 0, 1)}/.metadata", {})
    folder.commit(20, {}, "run")
    folder.clean(keep=1, known=20)
    assert half_uploads(client, name) == [f"{folder.part(30, 0, 1)}/__0_0.distcp"]
    folder.store.delete_all()
    assert half_uploads(client, name) == []
