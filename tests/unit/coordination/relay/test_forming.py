"""Machines of a large job meet before it has slots: joins are merged, and one machine reads the store."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from swift_ft.coordination import meeting
from swift_ft.coordination.journal import Journal
from swift_ft.coordination.meeting import Meeting, Met
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore, TCPStore
from tests.support.relays import RelayedJob, RelayedMachine
from tests.support.waiting import wait_until

MACHINES = 14
NAMES = [f"m{number}" for number in range(MACHINES)]


@pytest.fixture
def job() -> Iterator[RelayedJob]:
    """A job without machines, in groups of two."""
    job = RelayedJob(fanout=2, silence_s=60.0)
    Journal(job.log, by="test").append(ev.JobOpened(machines=MACHINES, workers_per_machine=1))
    yield job
    job.close()


def test_machines_that_join_at_once_cost_few_blocks_and_few_reads(job: RelayedJob) -> None:
    job.add_at_once(NAMES)
    job.until(lambda state: state.phase == Phase.AGREEING)
    joined = [s.event for block in job.log.blocks() for s in block if isinstance(s.event, ev.MachineJoined)]
    assert sorted(event.machine for event in joined) == sorted(NAMES)
    assert len(job.log.texts) < MACHINES / 2
    beginnings, root = MACHINES, len(job.log.texts)
    assert job.log.reads <= beginnings + 2 * root


def test_a_machine_that_was_met_is_dead(job: RelayedJob) -> None:
    """Those that went through it go to the store, and lose no join."""
    job.add_at_once(NAMES[:7])
    job.machines["m1"].kill()
    for name in NAMES[7:]:
        job.add(name)
    Journal(job.log, by="test").append(ev.MachineLost(machine="m1", reason="killed"))
    job.add("another")
    job.until(lambda state: state.phase == Phase.AGREEING)
    for name in ("m3", "m4"):
        assert job.machines[name].upstream.head != "m1"


def test_until_it_has_met_another_one_a_machine_reads_only_how_the_journal_begins(job: RelayedJob) -> None:
    job.add("m0")
    late = job.machines["m1"] = RelayedMachine(job, "m1", meets=True)
    assert late.follower.state.shape.machines == MACHINES
    assert not late.follower.state.membership.spares
    late.relay.meet(Met("m0", "m0"))
    assert late.follower.wait_for(lambda state: "m0" in state.membership.spares, 20.0) is not None
    wait_until(lambda: late.upstream.head == "m0", "the machine that it has met")


# ----------------------------------------------------------------------------------------------- tickets


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def client(server: TCPStore) -> RendezvousStore:
    return RendezvousStore(lambda: TCPStore("127.0.0.1", server.port, None, False))


def test_each_machine_meets_the_one_with_the_ticket_above(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent name server costs each connection 5 s (docs/decisions/0068-name-server.md): all wait."""
    monkeypatch.setattr(meeting, "_TOLD_S", 100.0)
    meetings = [Meeting(client(server), fanout=2) for _ in range(7)]
    assert [one.ticket for one in meetings] == list(range(7))
    found: dict[int, Met | None] = {}

    def meet(one: Meeting) -> None:
        found[one.ticket] = one.meet(Met(f"m{one.ticket}.0", f"h:{one.ticket}"))

    threads = [threading.Thread(target=meet, args=(one,), daemon=True) for one in reversed(meetings)]
    for thread in threads:  # the last one waits for those before it
        thread.start()
    for thread in threads:
        thread.join(100.0)
    above = [None if met is None else met.machine for met in (found[ticket] for ticket in range(7))]
    assert above == [None, "m0.0", "m0.0", "m1.0", "m1.0", "m2.0", "m2.0"]
    assert found[6] == Met("m2.0", "h:2")


def test_a_machine_that_never_says_where_it_is_holds_up_no_other(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_TOLD_S", 0.01)
    Meeting(client(server), fanout=2)
    assert Meeting(client(server), fanout=2).meet(Met("m1.0", "h:1")) is None
