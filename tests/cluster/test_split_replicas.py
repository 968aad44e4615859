"""Tensor parallelism, DDP and a pipeline: a machine's parts of a stage come from its replicas (§4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import ClusterRun, assert_identical, run_cluster

SCRIPT = Path(__file__).parent / "scripts" / "split_replicas.py"


def run_split(folder: Path, inject: str = "") -> ClusterRun:
    """Machines 0 and 1 have the first stage, each both of its parts; 2 and 3 the last one."""
    places = ["--store", str(folder / "store"), "--weights-out", str(folder / "weights")]
    return run_cluster(folder, inject=inject, flags=["--nproc-per-node", "2"], script=[str(SCRIPT), *places])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return run_split(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    "at",
    ["machine=1 iteration=5 point=backward microbatch=2", "machine=2 iteration=4 point=optimizer"],
)
def test_a_machine_with_both_parts(at: str, tmp_path: Path, undisturbed: ClusterRun) -> None:
    run = run_split(tmp_path, f"kill {at}")
    assert_identical(run, undisturbed)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replica"], run.output[-3000:]
    slot = int(at[len("machine=")])
    other = slot ^ 1
    pairs = {(2 * other + part, 2 * slot + part) for part in range(2)}
    whole = {(t.source, target) for t in run.last_plan().transfers for target in t.targets}
    assert pairs <= whole, run.last_plan().transfers
