"""The suite on a real HDFS."""

from __future__ import annotations

import gc
import multiprocessing
import uuid
import warnings

import pytest

from benchmarks.lib.hadoop import HdfsCluster
from swift_ft.storage.store import Store
from swift_ft.testing import StoreConformanceTests


class TestHdfsStore(StoreConformanceTests):
    @pytest.fixture
    def url(self, hdfs: HdfsCluster) -> str:
        return f"{hdfs.url}/{uuid.uuid4().hex}"


def test_a_create_whose_answer_was_lost_still_won(hdfs: HdfsCluster) -> None:
    """The client repeats it, and finds its own file there."""
    store = Store(f"{hdfs.url}/{uuid.uuid4().hex}")
    mine, other = (
        store._absolute("claim.json.0123456789ab.tmp"),
        store._absolute("claim.json.ba9876543210.tmp"),
    )
    path = store._absolute("claim.json")
    store._files.stage(mine, b"{}")
    for _ in range(2):
        store._files.create(mine, path, b"{}")
    store._files.stage(other, b"{}")
    with pytest.raises(FileExistsError):
        store._files.create(other, path, b"{}")
    assert store.list("") == ["claim.json"]


def test_a_process_may_fork_after_a_store_is_dropped(hdfs: HdfsCluster) -> None:
    """There fsspec drops its clients, and the end of a client waits for threads that are not there."""
    Store(f"{hdfs.url}/{uuid.uuid4().hex}").write_json("a.json", {})
    gc.collect()
    child = multiprocessing.get_context("fork").Process(target=int)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which is the point
        child.start()
    try:
        child.join(20)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()
