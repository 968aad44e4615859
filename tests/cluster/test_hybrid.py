"""Pipelines that are replicas of each other, on a device mesh: replication first, then the log (paper §3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import (
    EXAMPLES,
    ClusterRun,
    assert_clean,
    assert_identical,
    assert_undisturbed,
    run_cluster,
    training,
)


def run_hybrid(
    folder: Path, *, inject: str = "", script: Path = EXAMPLES / "train_hybrid.py", spares: int = 1
) -> ClusterRun:
    """Two replicas of a pipeline of two; ranks 0 and 2 hold the first stage, 1 and 3 the last."""
    return run_cluster(
        folder,
        *("--layers=4", "--microbatches=4"),
        inject=inject,
        flags=["--spares", str(spares)],
        script=training(folder, script),
    )


def assert_nothing_lost(recovery: dict[str, Any]) -> None:
    """Except for an iteration that was undone or replaced by a copy: other stages had not completed it."""
    given_up = {rank for rank, lost in recovery["iterations_lost"].items() if lost}
    assert given_up <= recovery["undone"].keys() | {str(rank) for rank in recovery["restored"]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    return assert_undisturbed(run_hybrid(tmp_path_factory.mktemp("undisturbed")))


@pytest.mark.parametrize(
    "fault",
    [
        "machine=2 iteration=0 point=backward microbatch=1",  # before any shape or bucket is known to all
        "machine=0 iteration=5 point=forward microbatch=2",
        "machine=1 iteration=5 point=forward microbatch=1",
        "machine=2 iteration=5 point=backward microbatch=3",
        "machine=3 iteration=5 point=reducing",
        "machine=1 iteration=5 point=optimizer",
        "machine=2 iteration=4 point=between",
    ],
)
def test_a_stage_comes_from_its_replica(fault: str, tmp_path: Path, undisturbed: ClusterRun) -> None:
    run = run_hybrid(tmp_path, inject=f"kill {fault}")
    assert_identical(run, undisturbed)
    assert_clean(run)
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replica"
    assert_nothing_lost(recovery)


def test_replicas_of_different_stages(tmp_path: Path, undisturbed: ClusterRun) -> None:
    second = "kill machine=3 iteration=5 point=forward microbatch=1"
    run = run_hybrid(tmp_path, inject=f"kill machine=0 iteration=5 point=forward microbatch=2; {second}")
    assert_identical(run, undisturbed)
    assert {recovery["mode"] for recovery in run.recoveries} == {"replica"}


def test_a_completed_step_is_undone(tmp_path: Path, undisturbed: ClusterRun) -> None:
    """The last stage has completed the iteration in which the first one is interrupted, and loses a replica.

    No log holds its last messages, so the survivor rolls back by exact undo. (If the fault was early enough
    to interrupt the last stage too, no worker was ahead.)
    """
    second = "break worker=0 iteration=5 point=backward microbatch=3"
    run = run_hybrid(tmp_path, inject=f"kill machine=3 iteration=5 point=optimizer; {second}")
    assert_identical(run, undisturbed)
    assert len(run.events("FaultInjected")) == 2
    for recovery in run.recoveries:
        assert recovery["mode"] in ("replica", "continue")
        assert_nothing_lost(recovery)


def test_all_replicas_of_a_stage(tmp_path: Path, undisturbed: ClusterRun) -> None:
    """The last one dies while it sends its state to the replacement of the other."""
    second = "kill machine=3 iteration=any point=transfer"
    run = run_hybrid(tmp_path, inject=f"kill machine=1 iteration=5 point=forward microbatch=1; {second}")
    assert_identical(run, undisturbed)
    recovery = run.recoveries[-1]
    assert (recovery["mode"], recovery["restored"]) == ("replay", [])
    assert recovery["replayed_iterations"].keys() == {"1", "3"}
    assert not any(recovery["iterations_lost"].values())


def test_all_replicas_before_the_first_regular_checkpoint(
    tmp_path: Path, undisturbed: ClusterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its very first iteration, DDP averages the first microbatch alone. So does the replay."""
    monkeypatch.setenv("SWIFT_TEST_VICTIMS", "0,2")
    monkeypatch.setenv("SWIFT_TEST_LOSSES", str(4 * 1 + 3))  # in iteration 1
    run = run_hybrid(tmp_path, script=Path(__file__).parent / "scripts" / "die_together.py", spares=2)
    assert_identical(run, undisturbed)
    (recovery,) = run.recoveries
    assert (recovery["mode"], recovery["resume"]) == ("replay", 1)
    assert recovery["replayed_iterations"] == {"0": 1, "2": 1}
