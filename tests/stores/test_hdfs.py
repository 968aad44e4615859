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
