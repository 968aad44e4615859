"""Undisturbed runs to compare with, and a finished one whose store is looked at."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import kill_processes_of, once, run_cluster, training
from tests.support.hosts import Hosts

SMALL_SEGMENTS = Path(__file__).parent / "scripts" / "small_segments.py"
NEWEST, OLDER, LENGTH = 12, 6, 17
"""The checkpoints in the store of the finished run, and its iterations."""


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Undisturbed runs of the example."""
    return once(tmp_path_factory, run_cluster)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a run of four workers. Machine 1 dies in iteration 14, and is replayed from 12."""
    folder = tmp_path_factory.mktemp("finished")
    script = [*training(folder, SMALL_SEGMENTS, iterations=LENGTH), f"--checkpoint-every={OLDER}"]
    run = run_cluster(folder, inject="kill machine=1 iteration=14 point=forward microbatch=3", script=script)
    assert run.code == 0, run.output[-3000:]
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"]
    return run.store


@pytest.fixture
def store(finished: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return shutil.copytree(finished, tmp_path / "store")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """A run that is killed if the test fails."""
    made = Hosts(tmp_path, 60)
    yield made
    kill_processes_of(tmp_path)
    for process in made.processes.values():
        process.wait(timeout=30)
