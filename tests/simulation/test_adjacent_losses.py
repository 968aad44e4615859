"""Neighbouring stages that are lost at once, in simulated pipelines (paper §5.1, Appendix B).

See `swift_ft/testing/simulation/jobs/adjacent.py`, and `replay.py` for joint replays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from swift_ft.recovery import protocol, targets
from swift_ft.recovery.events import CommunicationFailed, StatusReported
from swift_ft.recovery.handlers import recovery
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import Plan, RecoveryMode, Task, make_plan
from swift_ft.testing.simulation import JobKind, Violation, simulate
from swift_ft.testing.simulation.replay import ReplayingProcess
from tests.support.simulation import run_seeds

SHAPES = ((4, 1), (5, 1), (2, 2), (3, 2))


def run_jobs(machines: int, workers: int, seeds: int) -> Counter[str]:
    return run_seeds(JobKind.ADJACENT, machines, workers, seeds)


@pytest.mark.parametrize("machines", [4, 5])
def test_neighbouring_machines(machines: int) -> None:
    seen = run_jobs(machines, 1, 600)
    for size in range(2, machines):
        assert seen[f"replay group of {size}"] > 10, size
    for what in ("alone and jointly at once", "replay began again", "joint replay continued"):
        assert seen[what], what
    assert seen["replayed jointly"] > 100
    assert seen["helped"] > 20
    assert seen["declined to help"]
    assert seen["finished"] > 4 * seen["gave up"]


@pytest.mark.thorough
@pytest.mark.parametrize(("machines", "seeds"), [(2, 600), (3, 500)])
def test_machines_with_two_workers(machines: int, seeds: int) -> None:
    seen = run_jobs(machines, 2, seeds)
    for size in range(2, 2 * machines, 2):
        assert seen[f"replay group of {size}"] > 50, size
    assert not seen["replay group of 0"]
    assert seen["joint replay continued"]
    assert seen["replayed jointly"] > 100
    assert seen["finished"] > 4 * seen["gave up"]


# ------------------------------------------------------------------------------- defects that are found


def run_shapes(seeds: int) -> None:
    for seed in range(seeds):
        for machines, workers in SHAPES:
            simulate(JobKind.ADJACENT, seed, machines, workers)


def find(message: str) -> None:
    with pytest.raises(Violation, match=message):
        run_shapes(150)


def change_tasks(monkeypatch: pytest.MonkeyPatch, changed: Callable[[Task, StatusReported], Task]) -> None:
    """Change the tasks of all plans that replay."""

    def plan_with_changes(statuses: Mapping[int, StatusReported], **options: Any) -> Plan:
        made = make_plan(statuses, **options)
        if made.mode != RecoveryMode.REPLAY:
            return made
        return replace(made, tasks={rank: changed(task, statuses[rank]) for rank, task in made.tasks.items()})

    monkeypatch.setattr(recovery, "make_plan", plan_with_changes)


def test_a_replay_group_without_a_neighbour_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = targets._replay_groups

    def without_the_last(*arguments: Any) -> list[tuple[int, ...]]:
        return [members[:-1] for members in right(*arguments) if len(members) > 2]

    monkeypatch.setattr(targets, "_replay_groups", without_the_last)
    find("needs iteration .* of rank .*'s log: missing")


def test_members_that_begin_at_different_iterations_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def where_it_stopped(task: Task, status: StatusReported) -> Task:
        if not task.replay_group or status.iteration is None:
            return task
        return replace(task, load=None, begin=status.iteration)

    change_tasks(monkeypatch, where_it_stopped)
    find("and they begin with")


def test_a_survivor_that_has_to_load_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_the_beginning(task: Task, status: StatusReported) -> Task:
        return (
            replace(task, load=0, begin=0, replay_until=task.end, resend_from_log=False)
            if status.live
            else task
        )

    change_tasks(monkeypatch, from_the_beginning)
    find("is to do Task|is to load")


def test_a_read_of_the_log_of_a_member_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ReplayingProcess._replay_from

    def from_its_log(self: ReplayingProcess, peer: int, iteration: int) -> bool:
        replay_group, self.replay_group = self.replay_group, ()
        done = right(self, peer, iteration)
        self.replay_group = replay_group
        return done

    monkeypatch.setattr(ReplayingProcess, "_replay_from", from_its_log)
    find("needs iteration .* of rank .*'s log: missing")


def test_messages_inside_a_machine_that_count_as_logged_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(targets, "_add_unlogged_neighbours", lambda reconciled, *_: dict(reconciled))
    find("needs iteration .* of rank .*'s log: missing")


def test_a_broken_joint_replay_that_is_not_reported_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = recovery.communication_failed

    def while_live(state: State, event: CommunicationFailed) -> State:
        return right(state, event) if state.phase == Phase.LIVE else state

    monkeypatch.setitem(cast(Any, protocol._HANDLERS), CommunicationFailed, while_live)
    find("no end after|stuck")
