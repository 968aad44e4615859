"""A real training on a real HDFS: log, checkpoints, and the replay of a killed machine."""

from __future__ import annotations

import uuid
from pathlib import Path

import fsspec

from benchmarks.lib.hadoop import HdfsCluster
from swift_ft.offline.run_store import open_run_store
from swift_ft.offline.timeline import run_timeline
from tests.support.training import replayed_from


def test_a_killed_machine_is_replayed_from_hdfs(hdfs: HdfsCluster, tmp_path: Path) -> None:
    url = f"{hdfs.url}/{uuid.uuid4().hex}"
    replayed_from(url, tmp_path, machine=2, at="point=backward microbatch=2")
    fs, root = fsspec.core.url_to_fs(url)
    files = fs.find(root)
    assert any(file.endswith("/committed.json") for file in files)
    assert not [file for file in files if "/log/" in file and ".tmp" in file]
    found = run_timeline(open_run_store(url))
    assert (found.problems, found.unknown, found.ok) == ((), (), True)
    assert [worker.iteration for worker in found.totals] == [8] * 4
    assert [report.recovery.slots for report in found.recoveries] == [[2]]
