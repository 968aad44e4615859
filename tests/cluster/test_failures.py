"""Failures that are more than one clean death."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import KILLS_OTHERS, assert_clean, assert_identical, at_once, run_cluster, training

MID = "iteration=5 point=forward microbatch=3"


def test_two_failures_one_after_the_other(tmp_path: Path, references: Any) -> None:
    """The second replay reads what the first one logged again; the spare of the second is a machine that
    was started when the first one died."""
    faults = f"kill machine=1 {MID}; kill machine=2 iteration=7 point=backward microbatch=2"
    run = run_cluster(tmp_path, inject=faults)
    assert_identical(run, references())
    assert_clean(run)
    assert [r["way"] for r in run.recoveries] == ["replay", "replay"]
    assert [r["slots"] for r in run.recoveries] == [[1], [2]]


def test_neighbour_fails_right_after_a_replay(tmp_path: Path, references: Any) -> None:
    """Machine 2 needs messages of iterations that only the rebuilt machine 1 has logged."""
    faults = f"kill machine=1 {MID}; kill machine=2 iteration=5 point=backward microbatch=2"
    run = run_cluster(tmp_path, inject=faults)
    assert_identical(run, references())
    assert [r["way"] for r in run.recoveries] == ["replay", "replay"]


def test_the_same_machine_again_during_its_replay(tmp_path: Path, references: Any) -> None:
    faults = f"kill machine=1 {MID}; kill machine=1 iteration=4 point=replay"
    run = run_cluster(tmp_path, inject=faults)
    assert_identical(run, references())
    assert run.recoveries[0]["slots"] == [1, 1]
    assert run.recoveries[0]["way"] == "replay"


def test_two_distant_machines_at_once(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILLS", at_once(0, 2, by=1))
    run = run_cluster(tmp_path, flags=["--spares", "2"], script=training(tmp_path, KILLS_OTHERS))
    assert_identical(run, references())
    (recovery,) = run.recoveries
    assert sorted(recovery["slots"]) == [0, 2]
    assert recovery["way"] == "replay"
    assert not any(task.portion for task in run.last_plan().tasks.values())


@pytest.mark.parametrize("target", ["worker", "agent", "machine"])
def test_stopped(target: str, tmp_path: Path, references: Any) -> None:
    """SIGSTOP: nothing is closed, nothing answers; what comes back is fenced."""
    long = ("--iterations", "80")  # longer than the silence that is noticed
    run = run_cluster(tmp_path, *long, inject=f"stop {target}=1 {MID}", flags=["--heartbeat-timeout", "2"])
    assert_identical(run, references(*long))
    (recovery,) = run.recoveries
    assert recovery["way"] == "replay"
    assert "silent" in recovery["reasons"][0]


def test_worker_alone(tmp_path: Path, references: Any) -> None:
    """The worker dies, its agent lives: without a spare the machine itself comes back."""
    run = run_cluster(tmp_path, inject=f"kill worker=1 {MID}", flags=["--spares", "0"])
    assert_identical(run, references())
    assert run.recoveries[0]["reasons"] == ["worker 1 was killed by SIGKILL"]


def test_agent_alone(tmp_path: Path, references: Any) -> None:
    """Without its agent a machine is no machine: its worker ends with it."""
    run = run_cluster(tmp_path, inject=f"kill agent=1 {MID}")
    assert_identical(run, references())
    assert run.recoveries[0]["way"] == "replay"


def test_broken_network(tmp_path: Path, references: Any) -> None:
    """Connections break and nobody is dead: the same machines go on in a new generation."""
    run = run_cluster(tmp_path, inject=f"break worker=1 {MID}")
    assert_identical(run, references())
    (recovery,) = run.recoveries
    assert recovery["way"] == "continue"
    assert recovery["machines"] == []


def test_before_the_first_checkpoint(tmp_path: Path, references: Any) -> None:
    """Killed in the warm-up of the first iteration: the checkpoint of iteration 0 may or may not be there."""
    run = run_cluster(tmp_path, inject="kill machine=2 iteration=0 point=forward microbatch=0")
    assert_identical(run, references())
    assert len(run.recoveries) >= 1


def test_last_iteration(tmp_path: Path, references: Any) -> None:
    """Stages that have finished stay until everybody has: they may have to serve."""
    run = run_cluster(tmp_path, inject="kill machine=0 iteration=7 point=optimizer")
    assert_identical(run, references())
    assert run.recoveries[0]["way"] == "replay"


def test_marker_not_written(tmp_path: Path, references: Any) -> None:
    """Killed when all parts are there and the marker is not: the duty to commit is inherited."""
    run = run_cluster(tmp_path, inject="kill machine=0 iteration=3 point=commit")
    assert_identical(run, references())
    assert {event["iteration"] for event in run.events("Committed")} >= {3, 6}


def test_user_exception(tmp_path: Path) -> None:
    """It propagates, and it is never taken for a peer's death."""
    run = run_cluster(tmp_path, inject=f"raise worker=2 {MID}")
    assert run.code == 1
    assert "InjectedError" in run.output
    assert not run.recoveries
    assert not run.events("Lost")
    assert "worker 2: " in run.report["reason"]
