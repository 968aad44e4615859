"""A job changes to other machines by itself, where that pays, and says what it forecast and what came."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift_ft.recovery.causes import Cause
from swift_ft.recovery.entries import event_from_dict
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step
from tests.support.cluster import (
    EXAMPLES,
    ClusterRun,
    assert_identical,
    assert_undisturbed,
    run_cluster,
    training,
)

SLOW_LAYERS = Path(__file__).parent / "scripts" / "slow_layers.py"
OPTIONS = ["--layers=10", "--checkpoint-every=100"]
"""Twelve layers: 6 and 6, or 4, 4 and 4."""
ITERATIONS = 40
Run = Callable[..., ClusterRun]


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs an example on two machines, whose layers take their time, with a spare."""

    def run(policy: str, *flags: str, iterations: int = ITERATIONS, drain: str = "") -> ClusterRun:
        monkeypatch.setenv("LAYER_S", "0.01")
        monkeypatch.setenv("DRAIN", drain)
        script = [*training(tmp_path, SLOW_LAYERS, iterations=iterations), *OPTIONS]
        log = tmp_path / "log.jsonl"
        all_flags = ["--policy", policy, "--spares", "1", "--events-log", str(log), *flags]
        found = run_cluster(tmp_path, machines=2, script=script, flags=all_flags)
        assert found.code == 0, found.output[-3000:]
        return found

    return run


def undisturbed(folder: Path, machines: int) -> ClusterRun:
    script = [*training(folder, EXAMPLES / "train_elastic.py", iterations=ITERATIONS), *OPTIONS]
    return assert_undisturbed(run_cluster(folder, machines=machines, script=script))


def told(run: ClusterRun, event: str) -> list[dict[str, Any]]:
    """The facts of the log events of one kind."""
    lines = map(json.loads, (run.folder / "log.jsonl").read_text().splitlines())
    return [line["fields"] for line in lines if line["event"] == event]


def last_state(run: ClusterRun) -> State:
    state = State()
    for event in run.report["events"]:
        state = step(state, event_from_dict(event))
    return state


def test_a_job_with_a_spare_grows_by_itself(policy: Run, tmp_path: Path) -> None:
    run = policy("auto")
    state = last_state(run)
    assert (state.worlds.present.number, state.world_size) == (1, 3)
    assert_identical(run, undisturbed(tmp_path / "undisturbed", 3))
    (planned,) = run.events("ChangePlanned")
    assert planned["asked_by"] == "--policy auto"
    assert 0 < planned["after_ns"] < planned["before_ns"]
    (compared,) = told(run, "change_compared")
    assert compared["after_s"] == planned["after_ns"] / 1e9
    assert compared["cost_s"] == planned["cost_ns"] / 1e9
    assert compared["came_after_s"] > 0
    assert compared["came_cost_s"] > 0


@pytest.mark.thorough
def test_growing_is_advised_once_and_nothing_changes(policy: Run) -> None:
    run = policy("advise")
    (advised,) = told(run, "change_advised")
    assert (advised["kind"], advised["machines"]) == ("grow", 3)
    assert 0 < advised["after_s"] < advised["before_s"]
    assert advised["cost_s"] > 0
    assert advised["pays_after"] > 0
    assert not run.events("ChangePlanned")
    assert run.output.count("--policy advises a change") == 1


@pytest.mark.thorough
def test_a_machine_that_is_asked_to_leave_is_moved_away_from(policy: Run, tmp_path: Path) -> None:
    """No message is replayed, as after a drain."""
    run = policy("auto", "--policy-machines", "2:2", drain="1")
    state = last_state(run)
    assert state.worlds.present.number == 1
    (planned,) = run.events("ChangePlanned")
    assert "was asked to leave" in planned["reason"]
    (left,) = run.events("MachineLost")
    assert left["on_request"]
    assert left["machine"] not in planned["machines"]
    assert not any(recovery["replayed_iterations"] for recovery in run.recoveries)
    assert_identical(run, undisturbed(tmp_path / "undisturbed", 2))


@pytest.mark.thorough
def test_a_worker_that_never_has_enough_memory_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Further machines wait, and none of them helps: an equal one has as little."""
    monkeypatch.setenv("LAYER_S", "0")
    monkeypatch.setenv("STARVE", "12")
    script = [*training(tmp_path, SLOW_LAYERS, iterations=ITERATIONS), *OPTIONS]
    run = run_cluster(tmp_path, machines=2, script=script, flags=["--policy", "auto", "--spares", "3"])
    assert run.code == 1
    assert (
        "machine 1 ran out of memory 2 times without progress (worker 1 was killed by SIGKILL: "
        "the kernel was out of memory): let the script use less, or give its machine more"
    ) in run.output
    starved = [lost for lost in run.events("MachineLost") if lost["cause"] == Cause.MEMORY]
    assert len(starved) == 2


@pytest.mark.thorough
def test_no_change_that_costs_more_than_the_training_may(policy: Run) -> None:
    run = policy("auto", "--policy-price", "3.6:0.001")  # one second of one machine
    assert not run.events("ChangePlanned")
    (said,) = told(run, "change_too_dear")
    assert said["reason"].endswith("and may cost 0.001")
    assert run.output.count("but for --policy-price") == 1


@pytest.mark.thorough
def test_a_change_that_training_may_cost_is_made(policy: Run) -> None:
    run = policy("auto", "--policy-price", "3.6:100")
    (chosen,) = told(run, "change_chosen")
    assert 0 < chosen["price"] < 100
    (planned,) = run.events("ChangePlanned")
    assert planned["reason"].endswith("and may cost 100")
    world = last_state(run).worlds.present
    assert (world.number, world.spent_ns) == (1, 2 * world.since * planned["before_ns"])


@pytest.mark.thorough
def test_no_change_beyond_the_limits(policy: Run) -> None:
    assert not policy("auto", "--policy-machines", "1:2").events("ChangePlanned")
