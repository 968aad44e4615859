"""What an agent reports of neighbours that its sentinel loses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from immutables import Map

from swift_ft.errors import RendezvousLostError
from swift_ft.launch.detection.kernel_log import KernelLog
from swift_ft.launch.detection.neighbour_watch import NeighbourWatch, Ring
from swift_ft.launch.detection.policy import LostMachine
from swift_ft.network import JobSecret, Port
from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import Cause
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.membership import Membership
from swift_ft.recovery.protocol import step
from tests.support.clock import Clock
from tests.support.kernel_messages import LINK, XID, Kernel

SECRET = JobSecret(b"s" * 32)
LOST = LostMachine("B", "it is silent", silent=True)
FENCED = Membership(fenced=Map({"B": None}))


class Neighbour:
    """Machine A, whose sentinel tells it of B."""

    def __init__(self, kernel_log: KernelLog) -> None:
        self.reports: list[ev.Event] = []
        self.error: Exception | None = None
        self.follower = SimpleNamespace(state=State(phase=Phase.LIVE))
        membership: Any = SimpleNamespace(
            machine="A", follower=self.follower, journal=SimpleNamespace(append=self.append)
        )
        self.port = Port("127.0.0.1", SECRET)
        self.watch = NeighbourWatch(membership, self.port, SECRET, kernel_log, silence_s=60.0)

    def append(self, event: ev.Event) -> None:
        if self.error is not None:
            raise self.error
        self.reports.append(event)

    def close(self) -> None:
        self.watch.close()
        self.port.close()


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    with closing(Neighbour(KernelLog(Path("/none")))) as neighbour:
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


MACHINES = 4


def joined(machines: int) -> State:
    state = step(State(), ev.JobOpened(machines=MACHINES))
    for number in range(machines):
        state = step(state, ev.MachineJoined(machine=f"m{number}", address=f"m{number}:1"))
    return state


def test_a_job_that_forms_is_looked_at_the_more_rarely_the_larger_it_is() -> None:
    clock = Clock()
    ring = Ring(clock)
    watch = ring.news(joined(2), "m0")
    assert watch is not None
    assert watch.machines == {"m1": "m1:1"}
    assert ring.news(joined(3), "m0") is None
    clock.now += 0.01
    watch = ring.news(joined(3), "m0")
    assert watch is not None
    assert list(watch.machines) == ["m1", "m2"]


def test_once_it_has_formed_each_change_counts_at_once() -> None:
    ring, formed = Ring(Clock()), joined(MACHINES)
    assert formed.phase != Phase.FORMING
    assert ring.news(joined(2), "m0") is not None
    watch = ring.news(formed, "m0")
    assert watch is not None
    assert list(watch.machines) == ["m1", "m2", "m3"]
    assert ring.news(formed, "m0") is None
    lost = ring.news(step(formed, ev.MachineLost(machine="m1", reason="?")), "m0")
    assert lost is not None
    assert list(lost.machines) == ["m2", "m3"]


def test_the_reporter_s_own_link_may_be_at_fault(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path / "kmsg")
    with closing(Neighbour(kernel.log)) as neighbour:
        kernel.say(LINK, XID)
        neighbour.watch._report(LOST)
        (lost,) = neighbour.reports
    assert isinstance(lost, ev.MachineLost)
    assert lost.evidence == (f"at the reporter, the kernel said: {LINK}",)
    assert lost.cause == Cause.NETWORK
    assert_counts_for_nothing(lost)


def assert_counts_for_nothing(lost: ev.MachineLost) -> None:
    """The machine is lost, and comes back as good as before. That it was only silent is noted."""
    state = step(joined(MACHINES), replace(lost, machine="m1", reporter="m0"))
    assert "m1" in state.membership.fenced
    assert (dict(state.membership.silenced), dict(state.membership.losses)) == ({}, {})
    assert ("m1" in state.membership.silent) == lost.silent


def test_the_records_that_a_lost_worker_has_given_stay_known(neighbour: Neighbour) -> None:
    """By its rank, for those that come in its place; less is known of a later loss of that rank."""
    neighbour.watch._report(replace(LOST, recorded=(7,)))
    (lost,) = neighbour.reports
    assert isinstance(lost, ev.MachineLost)
    state = joined(MACHINES)
    for reported in (replace(lost, reporter="m0"), replace(lost, reporter="m2", recorded=(5,))):
        state = step(state, replace(reported, machine="m1"))
        assert dict(state.membership.recorded) == {1: 7}


@pytest.mark.parametrize("silent", [True, False])
def test_one_that_hears_nobody_blames_no_machine(neighbour: Neighbour, silent: bool) -> None:
    neighbour.watch._report(LostMachine("B", "it is silent", silent=silent, deaf=True))
    (lost,) = neighbour.reports
    assert isinstance(lost, ev.MachineLost)
    assert (lost.cause, lost.evidence) == (Cause.NETWORK, ("the reporter heard no other machine, either",))
    assert_counts_for_nothing(lost)


def test_what_a_link_has_told_is_not_doubted(tmp_path: Path) -> None:
    """The end of a connection came over it. Nor is a report without a sign of one's own fault."""
    kernel = Kernel(tmp_path / "kmsg")
    with closing(Neighbour(kernel.log)) as neighbour:
        neighbour.watch._report(LOST)
        kernel.say(LINK)
        neighbour.watch._report(LostMachine("C", "its agent's connection ended"))
        silent, ended = neighbour.reports
    for lost in (silent, ended):
        assert isinstance(lost, ev.MachineLost)
        assert not lost.cause
        state = step(joined(MACHINES), replace(lost, machine="m1", reporter="m0"))
        assert dict(state.membership.silenced) == {"m1": 1}
        assert state.membership.losses["m1"].count == 1
