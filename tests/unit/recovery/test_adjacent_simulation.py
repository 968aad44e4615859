"""Neighbouring stages that are lost at once, in the simulated network (paper §5.1, Appendix B).

See `adjacent_simulation.py`, and `simulated_replay.py` for what a joint replay is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from adjacent_simulation import simulate_adjacent
from simulated_replay import Rebuilt
from simulation import Violation

from swift_ft.recovery import plan, protocol
from swift_ft.recovery.events import Interrupted, Reported
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import Plan, Task, Way, make_plan

SHAPES = ((4, 1), (5, 1), (2, 2), (3, 2))


def run_all(machines: int, workers: int, seeds: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(seeds):
        seen += simulate_adjacent(seed, machines, workers).seen
    return seen


@pytest.mark.parametrize("machines", [4, 5])
def test_machines_beside_each_other(machines: int) -> None:
    seen = run_all(machines, 1, 600)
    for size in range(2, machines):
        assert seen[f"portion of {size}"] > 10, size
    for what in ("alone and jointly at once", "began again", "went on jointly"):
        assert seen[what], what
    assert seen["replayed jointly"] > 100
    assert seen["helped"] > 20
    assert seen["could not help"]
    assert seen["finished"] > 4 * seen["gave up"]


@pytest.mark.parametrize(("machines", "seeds"), [(2, 600), (3, 500)])
def test_machines_with_two_workers(machines: int, seeds: int) -> None:
    seen = run_all(machines, 2, seeds)
    for size in range(2, 2 * machines, 2):
        assert seen[f"portion of {size}"] > 50, size
    assert not seen["portion of 0"]
    assert seen["went on jointly"]
    assert seen["replayed jointly"] > 100
    assert seen["finished"] > 4 * seen["gave up"]


# ------------------------------------------------------------------------------------ what would be noticed


def run_shapes(seeds: int) -> None:
    for seed in range(seeds):
        for machines, workers in SHAPES:
            simulate_adjacent(seed, machines, workers)


def find(words: str) -> None:
    with pytest.raises(Violation, match=words):
        run_shapes(150)


def change_tasks(monkeypatch: pytest.MonkeyPatch, changed: Callable[[Task, Reported], Task]) -> None:
    """Of all plans that replay."""

    def plan_with_changes(standings: Mapping[int, Reported], **options: Any) -> Plan:
        made = make_plan(standings, **options)
        if made.way != Way.REPLAY:
            return made
        return replace(
            made, tasks={rank: changed(task, standings[rank]) for rank, task in made.tasks.items()}
        )

    monkeypatch.setattr(protocol, "make_plan", plan_with_changes)


def test_a_portion_that_leaves_out_a_neighbour_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = plan._portions

    def without_the_last(standings: Mapping[int, Reported]) -> dict[int, tuple[int, ...]]:
        portions = right(standings)
        return {r: members[:-1] for r, members in portions.items() if len(members) > 2 and r != members[-1]}

    monkeypatch.setattr(plan, "_portions", without_the_last)
    find("needs iteration .* of rank .*'s log: missing")


def test_members_that_begin_apart_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def where_it_stood(task: Task, standing: Reported) -> Task:
        if not task.portion or standing.iteration is None:
            return task
        return replace(task, load=None, begin=standing.iteration)

    change_tasks(monkeypatch, where_it_stood)
    find("and they begin with")


def test_a_survivor_that_is_made_to_load_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_the_beginning(task: Task, standing: Reported) -> Task:
        return replace(task, load=0, begin=0, replay_until=task.end, serve=False) if standing.live else task

    change_tasks(monkeypatch, from_the_beginning)
    find("is to do Task|is to load")


def test_a_member_whose_old_log_is_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Rebuilt._replay_from

    def from_its_log(self: Rebuilt, peer: int, iteration: int) -> bool:
        portion, self.portion = self.portion, ()
        served = right(self, peer, iteration)
        self.portion = portion
        return served

    monkeypatch.setattr(Rebuilt, "_replay_from", from_its_log)
    find("needs iteration .* of rank .*'s log: missing")


def test_messages_inside_a_machine_that_are_taken_for_logged_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "_with_who_logged_too_little", lambda _, settled, *__: settled)
    find("needs iteration .* of rank .*'s log: missing")


def test_a_broken_joint_replay_that_nobody_hears_of_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = protocol._interrupted

    def while_live(state: State, event: Interrupted) -> State:
        return right(state, event) if state.phase == Phase.LIVE else state

    monkeypatch.setitem(protocol._HANDLERS, Interrupted, while_live)
    find("no end after|stuck")
