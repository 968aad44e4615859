"""Relays of a journal whose beginning is gone: all that follow go on from its snapshot."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from swift_ft.coordination.block_log import BlockGoneError
from swift_ft.coordination.follower import Follower
from swift_ft.coordination.journal import Journal
from swift_ft.coordination.relay.lines import LocalLine, local_pair
from swift_ft.coordination.relay.outgoing import Outgoing
from swift_ft.coordination.relay.relay import Relay
from swift_ft.coordination.relay.upstream import Upstream
from swift_ft.coordination.relay.worker_journal import WorkerJournal
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from tests.support.relays import MemoryLog, RelayedJob
from tests.support.waiting import wait_until

FAULTS = [ev.FaultInjected(fault=str(number)) for number in range(8)]


def injected(state: State) -> set[str]:
    return set(state.injected)


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def relay(log: MemoryLog) -> Iterator[Relay]:
    """An agent's relay without the agent: it reads only what a test has it read."""
    outgoing = Outgoing()
    upstream = Upstream(Journal(log, by="agent"), None, outgoing)
    relay = Relay(upstream, outgoing, by="agent", append_s=30.0)
    yield relay
    relay.close()


@pytest.fixture
def worker(relay: Relay, log: MemoryLog) -> Iterator[WorkerJournal]:
    """The journal of a worker whose agent is never silent."""
    ours, theirs = local_pair()
    serving = threading.Thread(target=relay.serve, args=(LocalLine(ours),), daemon=True)
    serving.start()
    line = LocalLine(theirs)
    yield WorkerJournal(
        line,
        lambda: Journal(log, by="worker"),
        by="worker",
        append_s=30.0,
        on_agent_lost=lambda: None,
        silence_s=60.0,
    )
    line.close()  # a worker's own is open until its process ends
    serving.join(20.0)
    assert not serving.is_alive()


def test_a_machine_that_comes_late_and_its_workers_begin_from_the_snapshot() -> None:
    job = RelayedJob(fanout=2, silence_s=60.0)
    journal = Journal(job.log, by="test")
    journal.append(ev.JobOpened(machines=6, workers_per_machine=1))
    for slot in range(5):
        job.add(f"m{slot}").start_worker(f"worker {slot}")
    journal.append(*FAULTS)
    job.until(lambda state: len(injected(state)) == len(FAULTS))
    job.log.compact()
    late = job.add("m5")
    late.start_worker("worker 5")
    journal.append(ev.FaultInjected(fault="last"))
    job.until(lambda state: "last" in injected(state))
    states = {m.follower.state for m in job.machines.values()} | {late.workers[0].state}
    assert len(states) == 1
    assert len(injected(late.workers[0].state)) == len(FAULTS) + 1
    job.close()


def test_a_relay_that_skips_blocks_says_so_to_those_that_wait_for_them(
    log: MemoryLog, relay: Relay, worker: WorkerJournal
) -> None:
    journal = Journal(log, by="test")
    journal.append(FAULTS[0])
    assert relay.read(0, 0.0) is not None
    follower = Follower(worker)
    follower.start()
    assert follower.wait_for(lambda state: injected(state) == {"0"}, 20.0) is not None
    for fault in FAULTS[1:5]:
        journal.append(fault)
    log.compact()
    with pytest.raises(BlockGoneError):
        relay.read(1, 0.0)
    snapshot = relay.snapshot()
    assert snapshot is not None
    journal.append(*FAULTS[5:])
    assert relay.read(snapshot.number, 0.0) is not None
    assert follower.wait_for(lambda state: len(injected(state)) == len(FAULTS), 20.0) is not None


def test_an_event_that_a_snapshot_covers_has_arrived(log: MemoryLog, worker: WorkerJournal) -> None:
    """Its block is gone before the worker has read it."""
    appends = threading.Thread(target=worker.append, args=(FAULTS[0],), daemon=True)
    appends.start()
    wait_until(lambda: log.texts, "the event in the journal")
    log.compact()
    assert appends.is_alive()
    assert worker.read(0, 0.0) is None
    assert worker.snapshot() is not None
    appends.join(20.0)
    assert not appends.is_alive()
