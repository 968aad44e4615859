"""``swift-recover verify`` on real S3 and HDFS, after real runs that lost a machine."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.hadoop import HdfsCluster
from benchmarks.lib.seaweed import BUCKET, SeaweedServer
from swift_ft.cli.recover.main import main
from swift_ft.storage.store import Store
from tests.support.cluster import run_cluster


def verified(url: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = main(["verify", url, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (1 if found["findings"] else 0)
    return found


def flip_in_the_middle(store: Store, path: str) -> None:
    data = bytearray(b"".join(bytes(piece) for piece in store.read_pieces(path)))
    data[len(data) // 2] ^= 1
    store.delete(path)
    with store.open_write(path) as file:
        file.write(bytes(data))


def check(url: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What survivors had logged when a machine died is in the store, and the checkpoint before that."""
    run = run_cluster(
        folder,
        *("--store", url, "--iterations", "11", "--checkpoint-every", "6"),
        inject="kill machine=1 iteration=8 point=forward microbatch=3",
    )
    assert run.code == 0, run.output[-3000:]
    found = verified(url, capsys)
    assert found["findings"] == []
    assert [(one["iteration"], one["intact"]) for one in found["checkpoints"]] == [(0, True), (6, True)]
    assert found["segments"] >= 3
    assert found["messages"] >= 2 * 4 * 8
    assert [worker["until"] for worker in found["workers"]] == [found["newest"]] * 4

    store = Store(url)
    newest = "checkpoints/00000006/rank-00002"
    (part,) = (path for path in store.find("") if path.startswith(newest) and path.endswith(".distcp"))
    segments = [path for path in store.find("") if path.startswith("log/rank-00003") and "arrow" in path]
    segment = max(segments)  # the first may be of before the checkpoint, and about to be deleted
    flip_in_the_middle(store, part)
    flip_in_the_middle(store, segment)
    of_part, of_segment = verified(url, capsys)["findings"]
    assert of_part["path"] == part.rpartition("/")[0]
    back = "all would go back to the checkpoint of iteration 0"
    assert of_part["consequence"] == f"worker 2 could not be replayed: {back}"
    assert of_segment["path"] == segment
    assert of_segment["consequence"].startswith("worker 2 could not be replayed beyond iteration ")


def test_on_s3(seaweed: SeaweedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(f"s3://{BUCKET}/{uuid.uuid4().hex}", tmp_path, capsys)


def test_on_hdfs(hdfs: HdfsCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(f"{hdfs.url}/{uuid.uuid4().hex}", tmp_path, capsys)
