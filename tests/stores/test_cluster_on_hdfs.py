"""A real training on a real HDFS: log, checkpoints, and the replay of a killed machine."""

from __future__ import annotations

import uuid
from pathlib import Path

import fsspec
from hadoop import HdfsCluster
from training import replayed_from


def test_a_killed_machine_is_replayed_from_hdfs(hdfs: HdfsCluster, tmp_path: Path) -> None:
    url = f"{hdfs.url}/{uuid.uuid4().hex}"
    replayed_from(url, tmp_path, machine=2, at="point=backward microbatch=2")
    fs, root = fsspec.core.url_to_fs(url)
    files = fs.find(root)
    assert any(file.endswith("/committed.json") for file in files)
    assert not [file for file in files if "/log/" in file and ".tmp" in file]
