"""The suite on a real S3 server, and the peculiarities of such stores."""

from __future__ import annotations

import io
import json
import os
import traceback
import uuid
from typing import Any

import pytest

from benchmarks.lib.seaweed import BUCKET, SECRET_KEY, SeaweedServer
from swift_ft.checkpoint import store_claim
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.store_claim import delete_left_logs, log_directory
from swift_ft.cli.recover.main import main
from swift_ft.errors import StoreNotWritableError
from swift_ft.storage.digest import sealed
from swift_ft.storage.store import Store
from swift_ft.testing import StoreConformanceTests


class TestS3Store(StoreConformanceTests):
    @pytest.fixture
    def url(self, seaweed: SeaweedServer) -> str:
        return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def test_wrong_credentials_are_reported_and_not_shown(
    seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = f"{SECRET_KEY}-but-wrong"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong)
    with pytest.raises(StoreNotWritableError, match="cannot be written") as caught:
        Store(f"s3://{BUCKET}/x").probe()
    assert wrong not in "".join(traceback.format_exception(caught.value))


def half_uploaded(client: Any, key: str) -> None:
    """The remains of a process that was killed."""
    upload = client.call_s3("create_multipart_upload", Bucket=BUCKET, Key=key)
    part = io.BytesIO(os.urandom(5 << 20))
    client.call_s3(
        "upload_part", Bucket=BUCKET, Key=key, UploadId=upload["UploadId"], PartNumber=1, Body=part
    )


def half_uploads(client: Any, name: str) -> list[str]:
    uploads = client.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads", [])
    return [upload["Key"].removeprefix(f"{name}/") for upload in uploads if name in upload["Key"]]


def test_a_half_uploaded_segment_of_a_dead_writer_is_swept(seaweed: SeaweedServer) -> None:
    """No listing shows it, and it costs money until it is aborted."""
    name = uuid.uuid4().hex
    client = seaweed.client()
    for directory in ("log", "other"):
        half_uploaded(client, f"{name}/{directory}/g00001-s000000.arrow")
    Store(f"s3://{BUCKET}/{name}").sweep("log")
    assert half_uploads(client, name) == ["other/g00001-s000000.arrow"]


def test_half_uploaded_parts_are_swept_with_their_checkpoint(seaweed: SeaweedServer) -> None:
    """Parts of failed attempts and of iterations without a commit, but not of iterations to come."""
    name = uuid.uuid4().hex
    client = seaweed.client()
    folder = CheckpointFolder(Store(f"s3://{BUCKET}/{name}"))
    for iteration in (10, 20, 30):
        half_uploaded(client, f"{name}/{folder.part(iteration, 0, 1)}/__0_0.distcp")
    folder.store.write_json(f"{folder.part(10, 0, 1)}/.metadata", {})
    folder.commit(20, {}, "run", {})
    folder.clean((20,), 1, "run")
    assert half_uploads(client, name) == [f"{folder.part(30, 0, 1)}/__0_0.distcp"]
    folder.store.delete_all()
    assert half_uploads(client, name) == []


def test_half_uploaded_first_files_of_killed_workers_are_swept(seaweed: SeaweedServer) -> None:
    """No object shows these files. A worker that lives may upload; before a run begins, none does."""
    name = uuid.uuid4().hex
    client = seaweed.client()
    folder = CheckpointFolder(Store(f"s3://{BUCKET}/{name}"))
    killed, living, left = (folder.part(30, rank, 2) for rank in (0, 1, 4))
    for part in (killed, living, left, "log/rank-00000"):
        half_uploaded(client, f"{name}/{part}/__0_0.distcp")
    folder.store.write_json(f"{killed}/__0_1.distcp", {})  # with its last file the folder itself is gone
    folder.tidy({0: 3, 1: 2}, workers=4)
    assert sorted(half_uploads(client, name)) == [f"{living}/__0_0.distcp", "log/rank-00000/__0_0.distcp"]
    folder.sweep()
    assert half_uploads(client, name) == ["log/rank-00000/__0_0.distcp"]


@pytest.mark.parametrize("keep", [True, False])
def test_half_uploaded_first_segments_are_swept(keep: bool, seaweed: SeaweedServer) -> None:
    """At a good end those of ranks that the job has no longer, and all before a resumed run begins."""
    name = uuid.uuid4().hex
    client, store = seaweed.client(), Store(f"s3://{BUCKET}/{name}")
    present, gone = (f"{log_directory(rank)}/g00001-s000000.arrow" for rank in (1, 2))
    for path in (present, gone):
        half_uploaded(client, f"{name}/{path}")
    delete_left_logs(store, 2, keep=keep)
    assert half_uploads(client, name) == [present]
    store_claim._take_over_logs(store, set())
    assert half_uploads(client, name) == []


def test_an_upload_may_end_while_it_is_looked_at(
    seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that live upload while worker 0 tidies."""
    name = uuid.uuid4().hex
    store = Store(f"s3://{BUCKET}/{name}")
    half_uploaded(seaweed.client(), f"{name}/log/segment")
    files: Any = store.files
    listed = files._uploads(f"{BUCKET}/{name}")
    store.abort_uploads("")
    monkeypatch.setattr(files, "_uploads", lambda directory: listed)
    assert store.abandoned_uploads("") == {}
    store.abort_uploads("")


def test_a_bucket_is_created_on_request_only(seaweed: SeaweedServer) -> None:
    """A mistyped name must not make one."""
    bucket = f"mistyped-{uuid.uuid4().hex[:8]}"
    with pytest.raises(StoreNotWritableError, match=rf"no bucket {bucket}: create it, or add \?create=true"):
        Store(f"s3://{bucket}/run").probe()
    client = seaweed.client()
    client.invalidate_cache()
    assert bucket not in client.ls("/")
    asked = Store(f"s3://{bucket}/run?create=true")
    asked.probe()
    assert asked.url == f"s3://{bucket}/run"
    asked.write_json("run.json", {"run_id": "a"})
    assert Store(f"s3://{bucket}/run").read_json("run.json") == {"run_id": "a"}


def test_gc_shows_half_uploaded_objects_and_removes_them(
    seaweed: SeaweedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """No listing shows them, and they are paid for."""
    name, other = uuid.uuid4().hex, uuid.uuid4().hex
    url, client = f"s3://{BUCKET}/{name}", seaweed.client()
    topology = {"machines": 1, "workers": 1, "stages": 1}
    record = {"run_id": "run.1", "topology": topology, "earlier": [], "settings": {}}
    Store(url).write_json("run.json", sealed(record))
    for folder in (name, other):
        half_uploaded(client, f"{folder}/log/rank-00000/g00001-s000000.arrow")
    assert main(["gc", url, "--dry-run", "--json"]) == 0
    (upload,) = json.loads(capsys.readouterr().out)["uploads"]
    assert upload["path"] == "log/rank-00000/g00001-s000000.arrow"
    assert upload["size"] > 0
    assert half_uploads(client, name)
    assert main(["gc", url, "--yes"]) == 0
    assert half_uploads(client, name) == []
    assert half_uploads(client, other)
