"""When a launcher asks its scheduler, and what happens if that fails."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from swift_ft.errors import RendezvousLostError, SchedulerError
from swift_ft.launch.schedulers import requests
from swift_ft.launch.schedulers.requests import MachineRequests
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step, step_all
from swift_ft.recovery.requests import MOST_ASKED_AGAIN, slots_to_ask
from tests.support.journals import checkpoint, machine, opening
from tests.support.waiting import wait_until


class Journal:
    """A follower whose journal is this object."""

    def __init__(self, max_machine_failures: int | None = None) -> None:
        opened, *events = [*opening(3), *checkpoint(3, 10)]
        assert isinstance(opened, ev.JobOpened)
        opened = dataclasses.replace(opened, max_machine_failures=max_machine_failures)
        self.state = step_all(State(), [opened, *events])
        self.events: list[ev.Event] = []
        self._changed = threading.Condition()
        self.looks = 0

    def append(self, event: ev.Event) -> State:
        with self._changed:
            self.events.append(event)
            self.state = step(self.state, event)
            self._changed.notify_all()
        return self.state

    def wait_for(self, condition: Callable[[State], bool], timeout_s: float) -> None:
        with self._changed:
            self.looks += 1
            self._changed.wait_for(lambda: condition(self.state), timeout_s)

    def requests(self) -> int:
        return sum(isinstance(event, ev.MachinesRequested) for event in self.events)


class Scheduler:
    """Notes what it is asked for."""

    def __init__(self, fails: str = "") -> None:
        self.asked: list[tuple[int, str]] = []
        self.excluded: list[tuple[str, ...]] = []
        self.given: list[str] = []
        self._fails = fails

    def ask(self, count: int, reason: str, exclude: Sequence[str] = ()) -> None:
        self.excluded.append(tuple(exclude))
        self.asked.append((count, reason))
        if self._fails:
            raise SchedulerError(self._fails)

    def give_back(self, machines: Sequence[str]) -> None:
        self.given += machines
        if self._fails:
            raise SchedulerError(self._fails)


def requests_of(journal: Journal, scheduler: Scheduler, of: int = 0, wait_s: float = 0.0) -> MachineRequests:
    membership: Any = SimpleNamespace(machine=machine(of), follower=journal)
    return MachineRequests(scheduler, membership, wait_s)


def lost(number: int) -> ev.MachineLost:
    return ev.MachineLost(machine=machine(number), reason="power")


def test_the_first_machine_asks_once_for_each_loss() -> None:
    journal, schedulers = Journal(), [Scheduler() for _ in range(3)]
    machines = [requests_of(journal, scheduler, of) for of, scheduler in enumerate(schedulers)]
    journal.append(lost(2))
    wait_until(lambda: schedulers[0].asked, "a request")
    # It starts again, under the same duty: the journal knows that it has asked.
    again = requests_of(journal, schedulers[0])
    journal.append(lost(1))
    wait_until(lambda: len(schedulers[0].asked) == 2, "a second request")
    for each in (*machines, again):
        each.close(gives_back=False)
    assert schedulers[0].asked == [(1, "no machine fills slot 2"), (1, "no machine fills slot 1")]
    assert not schedulers[1].asked
    assert not schedulers[2].asked
    assert not schedulers[0].given


def test_one_more_is_asked_for_if_the_one_that_comes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_ASKS_AGAIN_S", 0.01)
    journal, scheduler = Journal(max_machine_failures=1), Scheduler()
    ours = requests_of(journal, scheduler)
    journal.append(ev.MachineJoined(machine="x.0", address="x:1", setup=("torch: 2",), identity="node7/0"))
    journal.append(ev.MachineLost(machine="x.0", reason="power"))
    journal.append(lost(2))
    wait_until(lambda: scheduler.asked, "a request")
    # The scheduler gives the same node again.
    journal.append(ev.MachineJoined(machine="y.0", address="y:1", setup=("torch: 2",), identity="node7/0"))
    wait_until(lambda: len(scheduler.asked) == 2, "a second request")
    ours.close(gives_back=False)
    assert scheduler.asked == [(1, "no machine fills slot 2")] * 2
    assert scheduler.excluded == [("node7",)] * 2


def test_the_same_node_again_and_again_is_asked_for_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    journal, scheduler = Journal(), Scheduler()
    for number in range(MOST_ASKED_AGAIN + 2):
        journal.append(
            lost(2) if not number else ev.MachineJoined(machine=f"y{number}.0", setup=("torch: 1",))
        )
        journal.append(ev.MachinesRequested(machine=machine(0), slots=(2,)))
    assert journal.state.membership.asked_again == MOST_ASKED_AGAIN
    assert not slots_to_ask(journal.state)
    journal.append(ev.MachineJoined(machine="z.0", address="z:1", setup=("torch: 2",)))
    assert not journal.state.membership.asked_again, "one has come"
    journal.append(ev.MachineLost(machine="z.0", reason="power"))
    journal.append(ev.MachinesRequested(machine=machine(0), slots=(2,)))
    journal.append(ev.MachineJoined(machine="y.0", setup=("torch: 1",)))
    ours = requests_of(journal, scheduler)
    looks = journal.looks
    wait_until(lambda: journal.looks > looks + 1, "looks at the empty slot")
    ours.close(gives_back=False)
    assert not scheduler.asked, "twenty seconds have not passed"
    monkeypatch.setattr(requests, "_ASKS_AGAIN_S", 0.0)
    ours = requests_of(journal, scheduler)
    wait_until(lambda: scheduler.asked, "a request")
    ours.close(gives_back=False)


def test_who_comes_back_was_not_asked_for() -> None:
    journal = Journal()
    journal.append(lost(2))
    journal.append(ev.MachinesRequested(machine=machine(0), slots=(2,)))
    journal.append(ev.HealthCheckFailed(machine="m-2.1", reason="its disk is full"))
    assert "m-2.1" in journal.state.membership.refused
    assert journal.state.membership.requested


def test_another_machine_asks_where_the_first_is_lost() -> None:
    journal, scheduler = Journal(), Scheduler()
    ours = requests_of(journal, scheduler, of=1)
    journal.append(lost(0))
    wait_until(lambda: scheduler.asked, "a request")
    ours.close(gives_back=False)
    assert scheduler.asked == [(1, "no machine fills slot 0")]


def test_a_machine_that_comes_soon_is_not_asked_for() -> None:
    journal, scheduler = Journal(), Scheduler()
    ours = requests_of(journal, scheduler, wait_s=600.0)
    journal.append(lost(2))
    looks = journal.looks
    wait_until(lambda: journal.looks > looks, "a look at the empty slot")
    journal.append(ev.MachineJoined(machine="new.0", address="new:1", setup=("torch: 2",)))
    ours.close(gives_back=False)
    assert not scheduler.asked
    assert not journal.requests()


def test_a_scheduler_that_fails_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    journal, scheduler = Journal(), Scheduler("sbatch ended with exit code 1: Invalid partition")
    ours = requests_of(journal, scheduler)
    with caplog.at_level(logging.WARNING):
        journal.append(lost(2))
        wait_until(lambda: caplog.messages, "a warning")
        journal.append(lost(1))
        wait_until(lambda: len(caplog.messages) == 2, "another warning")
        ours.close(gives_back=True)
    why = "sbatch ended with exit code 1: Invalid partition"
    assert caplog.messages == [
        f"The scheduler cannot give 1 machine: {why}. The run goes on.",
        f"The scheduler cannot give 1 machine: {why}. The run goes on.",
        f"The scheduler cannot give m-0.0 back: {why}. The run goes on.",
    ]
    assert len(scheduler.asked) == 2


def test_a_machine_that_has_left_is_given_back() -> None:
    scheduler = Scheduler()
    requests_of(Journal(), scheduler, of=1).close(gives_back=True)
    assert scheduler.given == [machine(1)]


def test_the_end_of_the_run_or_of_its_store_ends_it() -> None:
    journal, scheduler = Journal(), Scheduler()
    ours = requests_of(journal, scheduler)
    journal.append(ev.JobClosed(reason="over"))
    wait_until(lambda: not ours._thread.is_alive(), "the end")

    class Gone(Journal):
        def wait_for(self, condition: Callable[[State], bool], timeout_s: float) -> None:
            raise RendezvousLostError("gone")

    ours = requests_of(Gone(), scheduler)
    wait_until(lambda: not ours._thread.is_alive(), "the end")
