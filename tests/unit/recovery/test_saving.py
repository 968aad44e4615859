"""When a worker saves, when it asks for an early checkpoint, and what it waits for at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swift_ft.recovery import events as ev
from swift_ft.recovery.checkpoint import CheckpointFolder
from swift_ft.recovery.coordinator import Coordinator
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.saving import Saver

EVERY = 20


class Job:
    """A worker of a job that trains in generation 3: as much of it as a saver meets."""

    def __init__(self) -> None:
        self.state = State(phase=Phase.LIVE, generation=3, committed=20)
        self.told: list[ev.Event] = []
        self.waited_for: list[object] = []
        self.idle = True
        self.looks_until_idle: int | None = None
        self.lost = False
        self.log = SimpleNamespace(generation=3)
        self.folder = CheckpointFolder(cast(Any, None))
        self.being_written: dict[str, Callable[[], None]] = {}
        context = SimpleNamespace(rank=1, timeouts=SimpleNamespace(checkpoint_s=7.0))
        self.saver = Saver(*cast(Any, (context, self, self, self.log)), every=EVERY)

    def tell(self, event: ev.Event) -> None:
        self.told.append(event)

    def save(self, iteration: int, path: str, on_durable: Callable[[], None]) -> None:
        self.being_written[path] = on_durable

    def wait(self, timeout_s: float) -> bool:
        if timeout_s:
            self.waited_for.append("the part")
            self.idle |= len(self.waited_for) == self.looks_until_idle
        return self.idle

    def disturbed(self, state: State) -> bool:
        return self.lost

    def wait_for_commit(self, iteration: int, timeout_s: float) -> None:
        self.waited_for.append(iteration)


@pytest.fixture
def job() -> Job:
    return Job()


def test_a_checkpoint_is_due_regularly_and_as_asked_for(job: Job) -> None:
    assert [i for i in range(20, 61) if job.saver.due(i)] == [20, 40, 60]
    job.state = State(wanted=33)
    assert [i for i in range(20, 61) if job.saver.due(i)] == [20, 33, 40, 60]


def test_who_asks_leaves_an_iteration_to_learn_of_it(job: Job) -> None:
    job.saver.ask(30, 3, "its log is nearly full")
    assert job.told == [ev.CheckpointWanted(1, 32, 3, "its log is nearly full")]


@pytest.mark.parametrize("iteration", [38, 39, 40])
def test_nobody_asks_when_a_regular_one_is_near(job: Job, iteration: int) -> None:
    job.saver.ask(iteration, 3, "")
    assert not job.told


def test_nobody_asks_while_a_part_is_being_written(job: Job) -> None:
    job.idle = False
    job.saver.ask(30, 3, "")
    assert not job.told


def test_nobody_asks_in_a_recovery(job: Job) -> None:
    job.state = State(phase=Phase.AGREEING, generation=4)
    job.saver.ask(30, 3, "")
    assert not job.told


def test_a_wish_is_repeated_once_everybody_has_gone_past_the_first(job: Job) -> None:
    job.state = State(phase=Phase.LIVE, wanted=32)
    for iteration in (30, 31, 32):
        job.saver.ask(iteration, 3, "")
    assert not job.told
    job.saver.ask(33, 3, "")
    assert job.told == [ev.CheckpointWanted(1, 35, 3, "")]


def test_an_iteration_that_is_repeated_is_saved_again_elsewhere(job: Job) -> None:
    """The first part is told of late, and as what it is: one of the generation before."""
    job.saver.save(40)
    job.log.generation = 4
    job.saver.save(40)
    old, new = sorted(job.being_written)
    for path in (old, new):
        job.being_written[path]()
    assert job.told == [ev.Durable(1, 40, 0, 3, old), ev.Durable(1, 40, 0, 4, new)]


def test_who_saves_nothing_tells_at_once_where_the_keeper_does(job: Job) -> None:
    holds = ("the model",)
    job.state = replace(job.state, reports={r: ev.Reported(r, 3, 20, True, holds=holds) for r in range(3)})
    job.saver.save(40)
    assert not job.being_written
    assert job.told == [ev.Durable(1, 40, 0, 3, job.folder.part(40, 0, 3))]


def test_what_is_committed_is_not_saved(job: Job) -> None:
    job.saver.save(20)
    assert not job.being_written


def test_the_commit_of_the_last_regular_checkpoint_is_waited_for(job: Job) -> None:
    """One that was asked for may lack a part for ever."""
    job.state = State(wanted=33)
    job.saver.finish(33)
    job.saver.finish(40)
    assert job.waited_for == [20, 40]


def test_a_part_that_is_being_written_is_waited_for(job: Job) -> None:
    job.idle = False
    job.looks_until_idle = 3
    job.saver.wait_for_part()
    assert job.waited_for == ["the part"] * 3


def test_a_loss_ends_the_wait_for_a_part(job: Job) -> None:
    job.idle, job.lost = False, True
    job.saver.wait_for_part()
    assert job.waited_for == ["the part"]


class Told:
    """A follower of a job whose state is known."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.waiting = False

    def wait_for(self, condition: Callable[[State], bool], timeout_s: float) -> State | None:
        self.waiting = not condition(self.state)
        return None if self.waiting else self.state


@pytest.mark.parametrize(
    ("committed", "parts", "waits"),
    [
        (40, {}, False),
        (20, {0: "a", 1: "b"}, True),  # somebody is about to write the marker
        (20, {1: "b"}, False),  # its keeper was lost
        (20, {}, False),
    ],
)
def test_a_commit_is_waited_for_while_it_can_come(committed: int, parts: dict[int, str], waits: bool) -> None:
    state = State(machines=2, workers=1, committed=committed, durable={40: parts} if parts else {})
    coordinator = object.__new__(Coordinator)
    coordinator.follower = told = cast(Any, Told(state))
    with nullcontext() if committed == 40 else pytest.warns(match="of iteration 40, is not committed"):
        coordinator.wait_for_commit(40, 7.0)
    assert told.waiting == waits


def test_a_store_that_is_slow_to_clean_does_not_fail_the_run() -> None:
    coordinator = object.__new__(Coordinator)
    coordinator.context = cast(Any, SimpleNamespace(rank=1))
    cleaned = threading.Event()
    with ThreadPoolExecutor(1) as coordinator._housekeeper:
        coordinator._housekeeper.submit(cleaned.wait)
        with pytest.warns(match="old files are left"):
            coordinator.settle(0.01)
        cleaned.set()
