"""What an agent reports of neighbours that its sentinel loses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from immutables import Map

from swift_ft.errors import RendezvousLostError
from swift_ft.launch.detection.neighbour_watch import NeighbourWatch
from swift_ft.launch.detection.policy import LostMachine
from swift_ft.network import JobSecret, Port
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.membership import Membership

SECRET = JobSecret(b"s" * 32)
LOST = LostMachine("B", "it is silent", silent=True)
FENCED = Membership(fenced=Map({"B": None}))


class Neighbour:
    """Machine A, whose sentinel tells it of B."""

    def __init__(self) -> None:
        self.reports: list[ev.Event] = []
        self.error: Exception | None = None
        self.follower = SimpleNamespace(state=State(phase=Phase.LIVE))
        membership: Any = SimpleNamespace(
            machine="A", follower=self.follower, journal=SimpleNamespace(append=self.append)
        )
        self.port = Port("127.0.0.1", SECRET)
        self.watch = NeighbourWatch(membership, self.port, SECRET, silence_s=60.0)

    def append(self, event: ev.Event) -> None:
        if self.error is not None:
            raise self.error
        self.reports.append(event)

    def close(self) -> None:
        self.watch.close()
        self.port.close()


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    with closing(Neighbour()) as neighbour:
        yield neighbour


def test_a_lost_neighbour_is_reported(neighbour: Neighbour) -> None:
    neighbour.watch._report(LOST)
    assert neighbour.reports == [ev.MachineLost(machine="B", reason=LOST.reason, reporter="A", silent=True)]


@pytest.mark.parametrize("known", [State(membership=FENCED), State(phase=Phase.ENDED)])
def test_what_the_journal_has_is_not_reported_again(known: State, neighbour: Neighbour) -> None:
    neighbour.follower.state = known
    neighbour.watch._report(LOST)
    assert neighbour.reports == []


def test_a_report_that_fails_is_an_error_of_the_agent(neighbour: Neighbour) -> None:
    """It is found in a thread of the sentinel, and raised in the agent's own."""
    neighbour.error = RendezvousLostError("the store is gone")
    neighbour.watch.look(neighbour.follower.state)
    neighbour.watch._report(LOST)
    with pytest.raises(RendezvousLostError, match="the store is gone"):
        neighbour.watch.look(neighbour.follower.state)
