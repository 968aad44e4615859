"""Neighbouring stages that are lost at once are replayed jointly (paper §5.1, Appendix B).

The messages between them were not logged, or their log was lost: they are sent again, live. The messages at
the edges come from the logs of the neighbours outside.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import (
    KILLS_OTHERS,
    ClusterRun,
    assert_clean,
    assert_identical,
    at_once,
    run_cluster,
    training,
)

MID = "iteration=5 point=forward microbatch=3"
DEEP = ["--layers=16"]  # at least one layer in each of eight or sixteen stages


def assert_only_replayed(run: ClusterRun, slots: set[int], workers: int = 1) -> None:
    """All others kept their state, and only the interrupted iteration was repeated."""
    assert {recovery["mode"] for recovery in run.recoveries} == {"replay"}, run.output[-3000:]
    assert {slot for recovery in run.recoveries for slot in recovery["slots"]} == slots
    rebuilt = {str(slot * workers + worker) for slot in slots for worker in range(workers)}
    for recovery in run.recoveries:
        assert set(recovery["replayed_iterations"]) <= rebuilt
        lost = {rank for rank, count in recovery["iterations_lost"].items() if count}
        assert lost <= rebuilt


def run_two_by_two(folder: Path, *args: str, inject: str) -> ClusterRun:
    """Two machines with two workers each."""
    return run_cluster(folder, *args, inject=inject, machines=2, flags=["--nproc-per-node", "2"])


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize(
    "point",
    [
        "iteration=5 point=forward microbatch=0",
        "iteration=5 point=backward microbatch=5",
        "iteration=5 point=optimizer",
        "iteration=4 point=between",
    ],
)
def test_a_machine_with_two_workers(point: str, slot: int, tmp_path: Path, references: Any) -> None:
    """Its stages are a small live pipeline, with logged inputs at its edge."""
    run = run_two_by_two(tmp_path, inject=f"kill machine={slot} {point}")
    assert_identical(run, references())
    assert_clean(run)
    assert_only_replayed(run, {slot}, workers=2)


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B", "ZBVZeroBubble"])
def test_a_machine_with_two_workers_under_other_schedules(
    schedule: str, tmp_path: Path, references: Any
) -> None:
    run = run_two_by_two(tmp_path, "--schedule", schedule, inject=f"kill machine=1 {MID}")
    assert_identical(run, references("--schedule", schedule))
    assert_only_replayed(run, {1}, workers=2)


@pytest.mark.parametrize(("machines", "workers", "slot"), [(2, 4, 1), (4, 2, 1)])
@pytest.mark.thorough
def test_eight_workers(machines: int, workers: int, slot: int, tmp_path: Path) -> None:
    run = run_cluster(
        tmp_path,
        *DEEP,
        inject=f"kill machine={slot} {MID}",
        machines=machines,
        flags=["--nproc-per-node", str(workers)],
    )
    reference = run_cluster(
        tmp_path / "undisturbed", *DEEP, machines=machines, flags=["--nproc-per-node", str(workers)]
    )
    assert_identical(run, reference)
    assert_only_replayed(run, {slot}, workers=workers)


def test_dropout_on_a_machine_with_two_workers(tmp_path: Path, references: Any) -> None:
    run = run_two_by_two(tmp_path, "--dropout", "0.2", inject=f"kill machine=1 {MID}")
    assert_identical(run, references("--dropout", "0.2"))
    assert_only_replayed(run, {1}, workers=2)


def test_two_neighbouring_machines(tmp_path: Path, references: Any) -> None:
    faults = f"kill machine=1 {MID}; kill machine=2 {MID}"
    run = run_cluster(tmp_path, inject=faults, flags=["--spares", "2"])
    assert_identical(run, references())
    assert_clean(run)
    assert_only_replayed(run, {1, 2})


def test_neighbours_and_a_distant_one_in_the_same_instant(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours are one replay group; separate replay groups recover independently."""
    monkeypatch.setenv("KILLS", at_once(0, 1, 3, by=2))
    run = run_cluster(tmp_path, flags=["--spares", "3"], script=training(tmp_path, KILLS_OTHERS))
    assert_identical(run, references())
    assert len(run.recoveries) == 1
    assert_only_replayed(run, {0, 1, 3})
    replay_groups = {rank: task.replay_group for rank, task in run.last_plan().tasks.items()}
    assert replay_groups == {0: (0, 1), 1: (0, 1), 2: (), 3: ()}


def test_a_neighbour_is_lost_during_a_replay(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine that had begun its replay starts over, together with its neighbour."""
    monkeypatch.setenv("KILLS", at_once(2, by=1, iteration=4, replayed=True))
    script = training(tmp_path, KILLS_OTHERS)
    run = run_cluster(tmp_path, inject=f"kill machine=1 {MID}", flags=["--spares", "2"], script=script)
    assert_identical(run, references())
    assert_only_replayed(run, {1, 2})


def test_one_of_two_is_lost_again_in_their_joint_replay(tmp_path: Path, references: Any) -> None:
    faults = f"kill machine=1 {MID}; kill machine=2 {MID}; kill machine=2 iteration=4 point=replay"
    run = run_cluster(tmp_path, inject=faults, flags=["--spares", "3"])
    assert_identical(run, references())
    assert_clean(run)
    assert_only_replayed(run, {1, 2})


def test_a_machine_with_two_workers_is_lost_again_in_its_replay(tmp_path: Path, references: Any) -> None:
    faults = f"kill machine=1 {MID}; kill worker=3 iteration=4 point=replay"
    run = run_two_by_two(tmp_path, inject=faults)
    assert_identical(run, references())
    assert_only_replayed(run, {1}, workers=2)


@pytest.mark.thorough
def test_the_network_breaks_in_a_joint_replay(tmp_path: Path, references: Any) -> None:
    """No machine is dead: both resume from the iteration that they have reached."""
    faults = f"kill machine=1 {MID}; break worker=3 iteration=4 point=replay"
    run = run_two_by_two(tmp_path, inject=faults)
    assert_identical(run, references())
    assert_only_replayed(run, {1}, workers=2)
