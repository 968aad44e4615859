"""The end of a script is Python's: what runs on is awaited, what is open is written, the code is its own."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.cluster import ClusterRun, run_cluster

SCRIPT = Path(__file__).parent / "scripts" / "ends_itself.py"


def run_ending(folder: Path, how: str, *flags: str, machines: int = 1) -> ClusterRun:
    script = [str(SCRIPT), str(folder / "out"), how]
    return run_cluster(folder, machines=machines, script=script, flags=["--spares", "0", *flags])


def python(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(folder), how]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)


def contents(folder: Path) -> dict[str, bytes]:
    """What is in the files that a worker leaves behind. A packed one has the time in it."""
    return {
        path.name: gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for path in folder.iterdir()
    }


def test_all_that_python_finishes_is_finished(tmp_path: Path) -> None:
    """Threads, an executor, a process, handlers, open files, objects: each leaves what Python leaves."""
    done = python(tmp_path / "python", "exit 0")  # without torch, whose import takes long
    assert done.returncode == 0, done.stderr
    run = run_ending(tmp_path / "run", "", machines=2)
    assert run.code == 0, run.output[-3000:]
    expected = contents(tmp_path / "python" / "rank0")
    assert len(expected) == 10
    for rank in range(2):
        assert contents(run.folder / "out" / f"rank{rank}") == expected
    state = {"weights": torch.zeros(4)}
    dcp.load(state, checkpoint_id=run.folder / "out" / "checkpoint")
    assert state["weights"].tolist() == [0, 1, 2, 3]
    assert run.output.count("printed by C") == 2
    assert "Exception ignored" not in run.output


@pytest.mark.parametrize("how", ["exit", "exit 0", "exit below zero", "exit with words", "raise"])
def test_a_script_ends_with_its_own_code_and_words(tmp_path: Path, how: str) -> None:
    done = python(tmp_path / "python", how)
    run = run_ending(tmp_path / "run", how)
    assert run.code == done.returncode, run.output[-3000:]
    assert contents(run.folder / "out" / "rank0") == contents(tmp_path / "python" / "rank0")
    said = [line for line in run.output.splitlines() if line.startswith("[machine 0] ")]
    for line in done.stderr.splitlines():
        assert f"[machine 0] {line}" in said
    assert not run.recoveries


def test_a_thread_that_never_ends_does_not_hold_the_job_for_ever(tmp_path: Path) -> None:
    """The code says that something is missing, a line says what, and the files are written all the same."""
    run = run_ending(tmp_path, "hang", "--exit-timeout", "1")
    assert run.code == 1
    assert "the script has ended, and thread never-ends has not" in run.output
    assert "worker 0: the script ended, but thread never-ends did not within 1 s" in run.output
