"""What a worker that waits for others reports of those that do not answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from swift_ft.config.run_config import RunConfig
from swift_ft.coordination import participant
from swift_ft.coordination.participant import Participant
from swift_ft.coordination.progress import STANDS, Stand
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.protocol import step
from tests.unit.recovery.test_recoveries import report

PLACE = asdict(Stand(0, "at train.py:3 (load)", waits=False, stack=()))
LIMIT_S = 7.0


def state_after(*events: ev.Event, workers: int = 1) -> State:
    state, opened = State(), ev.JobOpened(machines=3, workers_per_machine=workers)
    for event in (opened, *(ev.MachineJoined(machine=m) for m in "ABC"), *events):
        state = step(state, event)
    return state


AGREEING = state_after(report(0, 1, None))
RECOVERING = state_after(
    *(report(rank, 1, None) for rank in range(3)),
    ev.CheckpointCommitted(iteration=20, epoch=1),
    ev.MachineLost(machine="B", reason="gone"),
    ev.MachineJoined(machine="D"),
    *(report(0, 2, 47), report(2, 2, 48), report(1, 2, None)),
    *(ev.WorkerReady(rank=rank, generation=2) for rank in (0, 2)),
)


class Follower:
    """Of a journal in which nothing happens until something is reported. Each wait reaches its limit."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.reports: list[ev.Event] = []
        self.waits = 0

    def append(self, event: ev.Event) -> State:
        self.reports.append(event)
        return self.state

    def wait_for(self, condition: Callable[[State], bool], timeout_s: float) -> State | None:
        assert timeout_s == LIMIT_S
        self.waits += 1
        return State(phase=Phase.ENDED) if self.reports else None


def reported(state: State, progress: Iterator[dict[int, dict[str, Any]]]) -> tuple[ev.DeadlinePassed, int]:
    """The only report of a worker that waits, and the deadlines that have passed by then."""
    waiting: Any = Participant.__new__(Participant)
    waiting.context = SimpleNamespace(config=RunConfig(report_timeout_s=LIMIT_S, replay_timeout_s=LIMIT_S))
    waiting._follower = follower = Follower(state)
    waiting._progress = SimpleNamespace(read_all=lambda _: next(progress))
    waiting._wait(lambda s: s.phase == Phase.ENDED)
    (passed,) = follower.reports
    assert isinstance(passed, ev.DeadlinePassed)
    return passed, follower.waits - 1


def test_late_machines_whose_workers_say_where_they_are_are_told_from_others() -> None:
    live = {"iteration": 0, "mode": "starting"}
    passed, _ = reported(AGREEING, iter([{0: {**live, STANDS: PLACE}, 1: {**live, STANDS: PLACE}, 2: live}]))
    assert (passed.machines, passed.located) == (("B", "C"), ("B",))
    assert passed.evidence == ("worker 1 is at train.py:3 (load)",)
    assert passed.reason == "no answer within 7 s (--report-timeout) while agreeing"


def test_a_machine_is_located_if_all_its_late_workers_are() -> None:
    """One that answers says nothing of its neighbour, whose device may hang."""
    state = state_after(report(4, 1, None), workers=2)
    at, nowhere = {STANDS: PLACE}, {"mode": "starting"}
    passed, _ = reported(state, iter([{0: at, 1: nowhere, 2: at, 3: at, 5: at}]))
    assert (passed.machines, passed.located) == (("A", "B", "C"), ("B", "C"))


def replaying(*facts: dict[str, Any]) -> Iterator[dict[int, dict[str, Any]]]:
    return ({1: {"mode": "replay", **one}} for one in facts)


def test_that_a_worker_was_asked_where_it_is_is_no_progress_of_a_replay() -> None:
    assert RECOVERING.phase == Phase.RECOVERING
    moved, stands = {"iteration": 21}, {"iteration": 22, STANDS: PLACE}
    passed, deadlines = reported(RECOVERING, replaying({"iteration": 20}, moved, {"iteration": 22}, stands))
    assert deadlines == 4
    assert (passed.machines, passed.located) == (("D",), ("D",))
    assert passed.reason == "no answer within 7 s (--replay-timeout) while recovering"


def test_a_machine_that_says_nothing_is_not_located() -> None:
    passed, _ = reported(RECOVERING, replaying({"iteration": 20}, {"iteration": 20}))
    assert (passed.machines, passed.located, passed.evidence) == (("D",), (), ())


@pytest.mark.parametrize(("state", "deadlines"), [(AGREEING, 3), (RECOVERING, 4)])
def test_nobody_is_late_while_the_rendezvous_store_is_silent(
    state: State, deadlines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--rendezvous-timeout`` may be longer than the limit of an answer, which the store has to take."""
    now, silences = 100.0, iter([60.0, 5.0, 0.2, 0.0])
    monkeypatch.setattr(participant, "time", SimpleNamespace(monotonic=lambda: now))

    def progress() -> Iterator[dict[int, dict[str, Any]]]:
        nonlocal now
        for silence_s in silences:
            now += silence_s
            yield {}

    _, passed = reported(state, progress())
    assert passed == deadlines
