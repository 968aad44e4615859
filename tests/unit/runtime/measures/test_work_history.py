"""What a worker notes of its own steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swift_ft.checkpoint.worker_history import GenerationWork, WorkerHistory
from swift_ft.logging import IterationStats
from swift_ft.runtime.measures.work_history import WorkHistory
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def written() -> list[WorkerHistory]:
    return []


@pytest.fixture
def history(clock: Clock, written: list[WorkerHistory]) -> WorkHistory:
    context: Any = SimpleNamespace(run_id="run.1", rank=3, started_in=2)
    return WorkHistory(context, written.append, clock)


def step(
    history: WorkHistory, clock: Clock, generation: int, iteration: int, replaying: bool = False
) -> None:
    """One step of two seconds, which logged ten messages and was held back for half a second."""
    history.begin(generation, replaying=replaying)
    clock.now += 2
    stats = IterationStats(messages=10, bytes=1000, held_back_s=0.5, step_s=2.0)
    history.complete(iteration, stats, replaying=replaying)


def test_a_replay_then_live_steps_then_an_interruption(
    history: WorkHistory, clock: Clock, written: list[WorkerHistory]
) -> None:
    step(history, clock, 2, 6, replaying=True)
    step(history, clock, 2, 7, replaying=True)
    clock.now += 1
    step(history, clock, 2, 8)
    clock.now += 1  # between two steps
    step(history, clock, 2, 9)
    clock.now += 1
    history.begin(2, replaying=False)
    (begun,) = written  # so that it is known if the worker is killed
    assert (begun.generations[0].began, begun.generations[0].replayed) == (105.0, 2)
    clock.now += 1
    history.interrupted()
    seen = written[-1]
    assert (seen.run_id, seen.rank, seen.started_in) == ("run.1", 3, 2)
    assert seen.generations == (
        GenerationWork(
            generation=2,
            began=105.0,
            until=110.0,
            steps=2,
            iteration=9,
            interrupted=111.0,
            held_back_s=1.0,  # replayed steps hold nobody back
            log_messages=40,
            log_bytes=4000,
            replayed=2,
            replay_s=4.0,
        ),
    )


def test_each_generation_has_numbers_of_its_own(
    history: WorkHistory, clock: Clock, written: list[WorkerHistory]
) -> None:
    step(history, clock, 2, 6)
    history.interrupted()  # between two steps
    clock.now = 200.0
    step(history, clock, 4, 7)
    history.write()
    first, second = written[-1].generations
    assert (first.generation, first.steps, first.until, first.interrupted) == (2, 1, 102.0, None)
    assert (second.generation, second.steps, second.began, second.until) == (4, 1, 200.0, 202.0)
    assert second.log_bytes == 1000


def test_saving_counts_while_live_only(history: WorkHistory, written: list[WorkerHistory]) -> None:
    history.begin(2, replaying=True)
    with history.saving(replaying=True):
        pass
    assert written[-1].generations[0].saving_s == 0
    with pytest.raises(ZeroDivisionError), history.saving(replaying=False):
        raise ZeroDivisionError
    assert written[-1].generations[0].saving_s > 0


def test_nothing_is_noted_before_the_first_step(history: WorkHistory, written: list[WorkerHistory]) -> None:
    history.write()
    assert written[0].generations == ()
