"""When a machine starts workers of the next world, and when it says that it cannot."""

from __future__ import annotations

import os
import selectors
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from swift_ft.launch.agent import next_world, room
from swift_ft.launch.agent.next_world import NextWorld
from swift_ft.launch.detection.worker_channels import WorkerChannels
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step
from tests.unit.recovery.test_worlds import live

PLACE = ("host", 29400)


def planned() -> State:
    state = step(live(), ev.ChangePlanned(world=1, machines=("B", "A"), reason="a test"))
    assert state.worlds.change is not None
    return state


class Agent:
    """An agent whose workers cannot even be described, with a journal that is a list."""

    def __init__(self, place: tuple[str, int] | None) -> None:
        self.events: list[ev.Event] = []
        bootstrap = SimpleNamespace(place_of_next=lambda machine, change: place)
        follower = SimpleNamespace(append=self.events.append, state=planned())
        membership: Any = SimpleNamespace(machine="A", bootstrap=bootstrap, follower=follower)
        heard = WorkerChannels(selectors.DefaultSelector())
        nothing: Any = None
        self.killed: str = ""  # what the kernel says
        kernel: Any = SimpleNamespace(why=lambda killed: self.killed)
        workers: Any = self
        self.next = NextWorld(workers, nothing, nothing, membership, nothing, heard, nothing, kernel)

    def workers_in(self, *_: object) -> NoReturn:
        raise AssertionError


def no_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All of the machine's memory is taken. Returns a list that grows with each look at it."""
    looks: list[int] = []

    def look() -> int:
        looks.append(1)
        return 0

    monkeypatch.setattr(room, "available_bytes", look)
    return looks


def test_without_room_the_change_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    no_memory(monkeypatch)
    agent = Agent(PLACE)
    agent.next.look(planned(), [os.getpid()])
    (event,) = agent.events
    assert isinstance(event, ev.ChangeGivenUp)
    assert event.world == 1
    assert event.reason.startswith("machine A: ")
    assert "of memory are left, and the next world's workers need" in event.reason
    assert agent.next.number is None


def test_memory_is_looked_at_once_it_is_known_where_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = no_memory(monkeypatch)
    agent = Agent(None)
    agent.next.look(planned(), [os.getpid()])
    assert not agent.events
    assert not looks
    assert agent.next.pause_s == next_world._PLACE_S


def test_a_worker_that_a_signal_stops_gives_the_change_up() -> None:
    """It would take its state at some time or never, and all others wait for it."""
    agent = Agent(PLACE)
    processes: Any = SimpleNamespace(owns=lambda report: report["stopped"] == 7)
    agent.next.processes, agent.next.number = processes, 1
    assert not agent.next.note({"stopped": 8})
    assert not agent.events
    assert agent.next.note({"stopped": 7})
    (event,) = agent.events
    assert isinstance(event, ev.ChangeGivenUp)
    assert (event.world, event.reason) == (
        1,
        "a worker of the next world on machine A (process 7) was stopped by a signal",
    )


@pytest.mark.parametrize(
    ("code", "said", "killed", "why"),
    [
        (-9, "", "the kernel was out of memory", "was killed by SIGKILL: the kernel was out of memory"),
        (-9, "", "", "was killed by SIGKILL"),
        (-40, "", "", "was killed by signal 40"),
        (137, "", "the kernel was out of memory", "ended with exit code 137: the kernel was out of memory"),
        (137, "OutOfMemoryError", "the kernel was out of memory", "OutOfMemoryError"),
        (1, "OutOfMemoryError: CUDA out of memory", "", "OutOfMemoryError: CUDA out of memory"),
        (3, "", "", "ended with exit code 3"),
    ],
)
def test_how_a_worker_of_the_next_world_has_ended(
    code: int, said: str, killed: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The present world trains on, and the change is given up with the cause."""
    agent = Agent(PLACE)
    agent.killed = killed
    following: Any = agent.next
    following.processes = SimpleNamespace(owns=lambda _: True, note=lambda _: 0, exit_codes={0: code})
    following.group = SimpleNamespace(workers=[SimpleNamespace(global_rank=2)])
    following.number = 1
    monkeypatch.setattr(following.heard, "read", lambda local_rank: None)
    if said:
        following.heard.failed[0] = {"failed": said}
    assert agent.next.note({"ended": 1})
    (event,) = agent.events
    assert isinstance(event, ev.ChangeGivenUp)
    assert event.reason == f"worker 2 of the next world on machine A: {why}"


def test_records_of_this_world_are_known_to_the_next_ones() -> None:
    """Both are made before the first change, and stay for all of them."""
    selector = selectors.DefaultSelector()
    heard = WorkerChannels(selector)
    following = WorkerChannels(selector, recorded=heard.recorded)
    for before in (48, 96):
        heard.recorded[0] = before
        assert following.recorded_with({1: 3}) == {0: before, 1: 3}
        heard.take_over(following)
