"""Failures beyond one clean death of a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import KILLS_OTHERS, assert_clean, assert_identical, at_once, run_cluster, training

HOLDS_INTERPRETER = Path(__file__).parent / "scripts" / "holds_interpreter.py"
STANDS_STILL = Path(__file__).parent / "scripts" / "stands_still.py"
MID = "iteration=5 point=forward microbatch=3"


def test_two_failures_one_after_the_other(tmp_path: Path, references: Any) -> None:
    """The second replay reads what the first one logged again.

    Its spare is a machine that was started after the first death.
    """
    faults = f"kill machine=1 {MID}; kill machine=2 iteration=7 point=backward microbatch=2"
    run = run_cluster(tmp_path, inject=faults)
    assert_identical(run, references())
    assert_clean(run)
    assert [r["mode"] for r in run.recoveries] == ["replay", "replay"]
    assert [r["slots"] for r in run.recoveries] == [[1], [2]]


def test_neighbour_fails_right_after_a_replay(tmp_path: Path, references: Any) -> None:
    """Machine 2 needs messages of iterations that only the rebuilt machine 1 has logged."""
    faults = f"kill machine=1 {MID}; kill machine=2 iteration=5 point=backward microbatch=2"
    run = run_cluster(tmp_path, inject=faults)
    assert_identical(run, references())
    assert [r["mode"] for r in run.recoveries] == ["replay", "replay"]


def test_the_same_machine_again_during_its_replay(tmp_path: Path, references: Any) -> None:
    faults = f"kill machine=1 {MID}; kill machine=1 iteration=4 point=replay"
    run = run_cluster(tmp_path, inject=faults)
    assert_identical(run, references())
    assert run.recoveries[0]["slots"] == [1, 1]
    assert run.recoveries[0]["mode"] == "replay"


@pytest.mark.thorough
@pytest.mark.parametrize("helpers", ["0", "1"])
def test_a_replay_that_stands_still_twice(tmp_path: Path, helpers: str) -> None:
    """Neither the spare nor the machine after it ends the replay: all return to the checkpoint.

    With a helper, nobody waits: both workers take part in the replay.
    """
    run = run_cluster(
        tmp_path,
        machines=2,
        inject="kill machine=1 iteration=5 point=forward",
        flags=["--replay-timeout", "2", "--helpers", helpers],
        script=training(tmp_path, STANDS_STILL),
    )
    assert run.code == 0, run.output[-3000:]
    (recovery,) = run.recoveries
    assert (recovery["mode"], recovery["slots"]) == ("fallback", [1, 1, 1])
    assert "machine 1 failed twice in the recovery in place at iteration 5" in recovery["reason"]


def test_two_distant_machines_at_once(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILLS", at_once(0, 2, by=1))
    run = run_cluster(tmp_path, flags=["--spares", "2"], script=training(tmp_path, KILLS_OTHERS))
    assert_identical(run, references())
    (recovery,) = run.recoveries
    assert sorted(recovery["slots"]) == [0, 2]
    assert recovery["mode"] == "replay"
    assert not any(task.replay_group for task in run.last_plan().tasks.values())


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("worker", "was stopped by a signal for 1 s"),
        ("agent", "its agent was silent for"),
        ("machine", "its agent was silent for"),
    ],
)
def test_stopped(target: str, reason: str, tmp_path: Path, references: Any) -> None:
    """SIGSTOP: nothing is closed, nothing answers. What wakes up later is fenced."""
    long = ("--iterations", "80")  # longer than a machine may be silent
    run = run_cluster(tmp_path, *long, inject=f"stop {target}=1 {MID}")
    assert_identical(run, references(*long))
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replay"
    assert reason in recovery["reasons"][0]


def test_worker_alone(tmp_path: Path, references: Any) -> None:
    """The worker dies, its agent lives: without a spare the machine itself joins again."""
    run = run_cluster(tmp_path, inject=f"kill worker=1 {MID}", flags=["--spares", "0"])
    assert_identical(run, references())
    assert run.recoveries[0]["reasons"] == ["worker 1 was killed by SIGKILL"]


@pytest.mark.thorough
def test_a_call_that_holds_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is longer than the deadline, in each replacement, too. After two false alarms the deadline grows."""
    monkeypatch.setenv("HOLDS", "3")
    run = run_cluster(
        tmp_path,
        machines=2,
        flags=["--heartbeat-timeout", "2"],
        script=training(tmp_path, HOLDS_INTERPRETER),
    )
    assert run.code == 0, run.output[-3000:]
    assert len(run.events("WorkerCameBack")) == len(run.events("MachineLost")) == 2
    assert "--heartbeat-timeout" in run.events("MachineLost")[0]["reason"]
    assert "raise --heartbeat-timeout" in run.output


def test_agent_alone(tmp_path: Path, references: Any) -> None:
    """A machine without an agent is lost: its worker ends, too."""
    run = run_cluster(tmp_path, inject=f"kill agent=1 {MID}")
    assert_identical(run, references())
    assert run.recoveries[0]["mode"] == "replay"


def test_broken_network(tmp_path: Path, references: Any) -> None:
    """Connections break but no machine is dead: the same machines continue in a new generation."""
    run = run_cluster(tmp_path, inject=f"break worker=1 {MID}")
    assert_identical(run, references())
    (recovery,) = run.recoveries
    assert recovery["mode"] == "continue"
    assert recovery["machines"] == []


def test_before_the_first_checkpoint(tmp_path: Path, references: Any) -> None:
    """Killed in the warm-up of the first iteration: the checkpoint of iteration 0 may or may not be there."""
    run = run_cluster(tmp_path, inject="kill machine=2 iteration=0 point=forward microbatch=0")
    assert_identical(run, references())
    assert len(run.recoveries) >= 1


def test_last_iteration(tmp_path: Path, references: Any) -> None:
    """Stages that have finished wait for all others, because a recovery may need them."""
    run = run_cluster(tmp_path, inject="kill machine=0 iteration=7 point=optimizer")
    assert_identical(run, references())
    assert run.recoveries[0]["mode"] == "replay"


def test_marker_not_written(tmp_path: Path, references: Any) -> None:
    """Killed when all parts are there and the marker is not: another machine commits."""
    run = run_cluster(tmp_path, inject="kill machine=0 iteration=3 point=commit")
    assert_identical(run, references())
    assert {event["iteration"] for event in run.events("CheckpointCommitted")} >= {3, 6}


def test_user_exception(tmp_path: Path) -> None:
    """It propagates, and is never mistaken for a peer's death."""
    run = run_cluster(tmp_path, inject=f"raise worker=2 {MID}")
    assert run.code == 1
    assert "InjectedError" in run.output
    assert not run.recoveries
    assert not run.events("MachineLost")
    assert "worker 2: " in run.report["reason"]
