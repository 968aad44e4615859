"""When a machine starts a guest, and when it says that it cannot."""

from __future__ import annotations

import errno
import json
import os
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pynvml
import pytest

from swift_ft.config import store_keys
from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.launch.agent import guests, room
from swift_ft.launch.agent.guests import FormingDeadline, Guests
from swift_ft.launch.agent.room import resident_bytes
from swift_ft.launch.processes.standby import Standby
from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import Cause
from swift_ft.recovery.job_state import State
from swift_ft.recovery.orders import agent_order
from swift_ft.recovery.protocol import step
from swift_ft.recovery.worlds import World
from tests.support.waiting import wait_until
from tests.unit.recovery.test_orders import failed_newcomers
from tests.unit.recovery.test_recoveries import report


class Fakes:
    """A standby that forks nothing, and a journal that is a list."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, str]] = []
        self.guests: dict[int, int] = {}
        self.unforked: dict[int, str] = {}
        self.events: list[ev.Event] = []
        self.machine = "A"
        self.journal = SimpleNamespace(append=self.events.append)
        self.store = SimpleNamespace(check=lambda _: True)

    def launch_guest(self, slot: int, host: str) -> None:
        self.launched.append((slot, host))
        self.guests[slot] = 0


def state_after(*events: ev.Event) -> State:
    state = step(State(), ev.JobOpened(machines=2))
    for machine in "AB":
        state = step(state, ev.MachineJoined(machine=machine))
    for event in events:
        state = step(state, event)
    return state


LOSS = state_after(ev.MachineLost(machine="B", reason="it was killed"))


def guests_of(fakes: Any, wait_s: float = 0.0) -> Guests:
    return Guests(fakes, fakes, wait_s)


def test_a_guest_is_started_once() -> None:
    fakes = Fakes()
    ours = guests_of(fakes)
    ours.check(state_after(), [])
    assert not fakes.launched
    for _ in range(3):
        ours.check(LOSS, [])
    assert fakes.launched == [(1, "A")]


class Clock:
    """A monotonic clock that stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(guests, "time", SimpleNamespace(monotonic=lambda: self.now))


def reason_of_end(fakes: Fakes) -> str:
    (closed,) = fakes.events
    assert isinstance(closed, ev.JobClosed)
    return closed.reason


def test_the_job_ends_if_no_machine_joins_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes: Any = Fakes()
    deadline, clock = FormingDeadline(fakes, 600.0, 10.0), Clock(monkeypatch)
    deadline.check(LOSS)
    clock.now += 599.0
    deadline.check(LOSS)
    deadline.check(state_after())  # all slots are filled
    clock.now += 600.0
    deadline.check(LOSS)
    clock.now += 599.0
    deadline.check(LOSS)
    assert not fakes.events, "each time that a slot is empty counts by itself"
    clock.now += 2.0
    deadline.check(LOSS)
    assert reason_of_end(fakes).startswith("no machine joined for slots [1] within 600 s: start one more")


def test_a_machine_that_was_told_to_stay_away_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause for an outage may be longer than ``--join-timeout``, which then counts from its end."""
    fakes: Any = Fakes()
    deadline, clock = FormingDeadline(fakes, 60.0, 10.0), Clock(monkeypatch)
    newcomers = [f"m.{number}" for number in range(6)]
    for count in range(6):
        deadline.check(failed_newcomers(*newcomers[:count]))
    state = failed_newcomers(*newcomers)
    assert agent_order(state, machine="m.5", started_in=None).wait_s == 160.0
    deadline.check(state)
    for seconds in (61.0, 98.0, 62.0):
        clock.now += seconds
        assert not fakes.events
        deadline.check(state)
    assert reason_of_end(fakes).startswith(
        "no machine joined for slots [1] within 60 s after the end of a pause, for which m had to stay away: "
    )


@pytest.mark.parametrize("silent_s", [0.5, 30.0])
def test_a_silent_store_takes_no_machine(silent_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its silence may last as long as ``--rendezvous-timeout``, and longer than ``--join-timeout``."""
    fakes: Any = Fakes()
    deadline, clock = FormingDeadline(fakes, 15.0, 10.0), Clock(monkeypatch)

    def check(_: list[str]) -> bool:
        clock.now += silent_s
        return True

    fakes.store.check = check
    deadline.check(LOSS)
    clock.now += 16.0
    deadline.check(LOSS)
    assert bool(fakes.events) == (silent_s < 1.0)
    clock.now += 14.0
    deadline.check(LOSS)
    if silent_s > 1.0:
        assert not fakes.events, "machines have as long as ever, once the store answers"
    silent_s = 0.0
    clock.now += 2.0
    deadline.check(LOSS)
    assert fakes.events


def test_a_store_that_is_frozen_holds_up_the_end_and_not_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel takes what is asked, and nothing comes back."""
    fakes: Any = Fakes()
    deadline, clock = FormingDeadline(fakes, 15.0, 10.0), Clock(monkeypatch)
    thaws = threading.Event()
    fakes.store.check = lambda _: thaws.wait(60)
    deadline.check(LOSS)
    clock.now += 16.0
    for _ in range(3):
        deadline.check(LOSS)
        clock.now += 10.0
    assert not fakes.events
    thaws.set()
    wait_until(lambda: threads_named("swift-forming") == 0, "the answer")
    for seconds in (0.0, 14.0):
        clock.now += seconds
        deadline.check(LOSS)
    assert not fakes.events, "machines have as long as ever, once the store answers"
    clock.now += 2.0
    deadline.check(LOSS)
    assert fakes.events


def threads_named(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_the_end_says_that_guests_would_have_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes: Any = Fakes()
    deadline, clock = FormingDeadline(fakes, 5.0, 10.0), Clock(monkeypatch)
    deadline.check(LOSS)
    clock.now += 6.0
    deadline.check(LOSS)
    assert ", and no other machine runs them before --elastic-wait (10 s): start" in reason_of_end(fakes)


def test_the_job_waits_for_a_machine_at_first() -> None:
    fakes = Fakes()
    ours = guests_of(fakes, wait_s=0.2)
    ours.check(LOSS, [])
    assert not fakes.launched

    def has_launched() -> bool:
        ours.check(LOSS, [])
        return bool(fakes.launched)

    wait_until(has_launched, "no guest was launched", 30.0)
    assert fakes.launched == [(1, "A")]


def test_the_wait_begins_anew_with_each_loss() -> None:
    fakes = Fakes()
    ours = guests_of(fakes, wait_s=1e-9)
    ours.check(LOSS, [])
    ours.check(state_after(), [])
    ours.check(LOSS, [])
    assert not fakes.launched
    ours.check(LOSS, [])
    assert fakes.launched == [(1, "A")]


def test_a_guest_that_ends_again_and_again_is_given_up() -> None:
    fakes = Fakes()
    ours = guests_of(fakes)
    for _ in range(3):
        ours.check(LOSS, [])
        fakes.guests.clear()
    assert not fakes.events
    ours.check(LOSS, [])
    assert fakes.launched == [(1, "A")] * 3
    assert fakes.events == [
        ev.GuestDeclined(machine="A", reason="its guest ended 3 times before it had joined")
    ]


def test_a_guest_whose_server_does_not_answer_comes_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, then after ten seconds, and so on: what it has met passes."""
    fakes = Fakes()
    ours = guests_of(fakes)
    now = 1000.0
    monkeypatch.setattr(guests, "time", SimpleNamespace(monotonic=lambda: now))
    state = state_after(
        *(report(rank, 1, None) for rank in range(2)), ev.MachineLost(machine="B", reason="it was killed")
    )
    for guest in ("G", "H"):
        assert ours.due_at is None
        ours.check(state, [])
        assert fakes.launched.pop() == (1, "A")
        fakes.guests.clear()
        state = step(state, ev.MachineJoined(machine=guest, host="A", preferred_slot=1))
        ours.check(state, [])
        failed = ev.ScriptFailed(
            machine=guest, started_in=state.generation, reason="HTTP Error 503", cause=Cause.NETWORK
        )
        state = step(state, failed)
    ours.check(state, [])
    assert not fakes.launched
    assert ours.due_at == now + 10.0
    now += 10.0
    ours.check(state, [])
    assert fakes.launched == [(1, "A")]
    assert not fakes.events


def test_a_machine_without_memory_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes()
    own = resident_bytes([os.getpid()])
    assert own > 10_000_000  # torch is imported
    monkeypatch.setattr(room, "available_bytes", lambda: own)
    guests_of(fakes).check(LOSS, [os.getpid()])
    assert not fakes.launched
    (declined,) = fakes.events
    assert isinstance(declined, ev.GuestDeclined)
    assert "of memory are left, and a guest needs" in declined.reason
    monkeypatch.setattr(room, "available_bytes", lambda: 2 * own)
    guests_of(fakes).check(LOSS, [os.getpid()])
    assert fakes.launched == [(1, "A")]


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [
        ([(30, 51), (39, 42)], "42.0 GB of the memory of GPU 1 are left, and a guest needs 46.8 GB"),
        ([(30, 51)], ""),
        ([], ""),
        (
            pynvml.NVMLError_NotSupported(),
            "the driver does not say how much memory its GPUs have left (Not",
        ),
        (pynvml.NVMLError_LibraryNotFound(), "(NVML Shared Library Not Found)"),
    ],
)
def test_the_memory_of_gpus(
    gpus: list[tuple[int, int]] | pynvml.NVMLError,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In GB, used and free."""
    known = [] if isinstance(gpus, pynvml.NVMLError) else gpus

    def memory(index: int) -> SimpleNamespace:
        used, free = known[index]
        return SimpleNamespace(used=used * 10**9, free=free * 10**9)

    def begin() -> None:
        if isinstance(gpus, pynvml.NVMLError):
            raise gpus

    monkeypatch.setattr(pynvml, "nvmlInit", begin)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(known))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory)
    assert not room.why_not_on_devices("a guest needs", tmp_path)  # no device file, so no driver is asked
    (tmp_path / "nvidiactl").touch()
    found = room.why_not_on_devices("a guest needs", tmp_path)
    assert reason in found
    assert bool(found) == bool(reason)


def test_the_standby_knows_its_guests() -> None:
    """Their ends are noted, whoever reads the report."""
    standby = Standby(become_guest=lambda slot, host, number: os._exit(slot + number))
    try:
        standby.launch_guest(2, "A")
        assert standby.guests == {2: 0}
        started = standby.receive()
        assert started is not None
        assert started["guest"] == 2
        assert standby.guests == {2: started["started"]}
        assert standby.receive() == {"ended": started["started"], "status": 3}
        assert standby.guests == {}
    finally:
        standby.close()


def test_guests_have_different_numbers() -> None:
    """The number of one that has ended is free again."""
    read_end, write_end = os.pipe()

    def become_guest(slot: int, host: str, number: int) -> NoReturn:
        if slot == 1:
            os.read(read_end, 1)
        os._exit(number)

    standby = Standby(become_guest=become_guest)
    try:
        for slot in (1, 2, 3):
            standby.launch_guest(slot, "A")
            started = standby.receive() or {}
            if slot > 1:
                assert standby.receive() == {"ended": started["started"], "status": 2}
    finally:
        standby.close()
        os.close(read_end)
        os.close(write_end)


def test_a_guest_that_cannot_be_forked_is_declined() -> None:
    """A limit of processes is reached: the standby and the machine's workers live on."""

    def no_process() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    standby = Standby(close_in_child=lambda: setattr(os, "fork", no_process))
    fakes = Fakes()
    fakes.launch_guest, fakes.guests, fakes.unforked = (  # type: ignore[method-assign]  # a real standby's
        standby.launch_guest,
        standby.guests,
        standby.unforked,
    )
    try:
        guests_of(fakes).check(LOSS, [])
        assert standby.receive() == {"guest": 1, "unforked": "[Errno 11] Resource temporarily unavailable"}
        assert standby.guests == {}
        guests_of(fakes).check(LOSS, [])
        (declined,) = fakes.events
        assert "it can start no more processes ([Errno 11]" in str(declined)
    finally:
        standby.close()


def test_costs_of_layers_are_those_of_the_present_world() -> None:
    """Workers of another world have the same ranks, and others of the layers."""

    def published(forward_ns: int) -> bytes:
        return json.dumps({"0": [asdict(LayerProfile(forward_ns, 2000, 8, name="0"))]}).encode()

    key = store_keys.layers(0)
    there = {key: published(1000), store_keys.of_world(1, key): published(5000)}
    fakes: Any = Fakes()
    fakes.store = SimpleNamespace(
        check=lambda keys: there.keys() >= {*keys}, multi_get=lambda keys: [there[key] for key in keys]
    )
    for world, expected in ((0, [1000]), (1, [5000]), (2, None)):
        state: Any = SimpleNamespace(
            world_size=1,
            layouts=SimpleNamespace(placed={0: (0,)}),
            worlds=SimpleNamespace(present=World(world)),
        )
        layers = guests_of(fakes)._measured(state)
        assert (None if layers is None else [layer.forward_ns for layer in layers]) == expected


def test_a_process_that_has_ended_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text(
        "Name:\tpython\nRssAnon:\t 12 kB\nRssFile:\t 9 kB\nRssShmem:\t 3 kB\n"
    )
    assert resident_bytes([7, 8], tmp_path) == 15 * 1024
