"""Relays of six machines in groups of two, in one process: what reaches the journal, and what does not."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from swift_ft.config import detection_timings as timings
from swift_ft.coordination.follower import Follower
from swift_ft.coordination.journal import Journal
from swift_ft.coordination.relay import merging, outgoing
from swift_ft.coordination.relay.relay import Relay
from swift_ft.coordination.relay.upstream import Upstream
from swift_ft.errors import RendezvousLostError
from swift_ft.recovery import events as ev
from swift_ft.recovery.blocks import Sequencer
from swift_ft.recovery.job_state import Phase
from tests.support.relays import MemoryLog, RelayedJob
from tests.support.waiting import wait_until

MACHINES = 6


@pytest.fixture
def job() -> Iterator[RelayedJob]:
    """Six machines with two workers each, all slots filled."""
    job = RelayedJob(fanout=2, silence_s=60.0)  # on a host with too much to do, none is silent
    Journal(job.log, by="test").append(ev.JobOpened(machines=MACHINES, workers_per_machine=2))
    for slot in range(MACHINES):
        job.add(f"m{slot}")
    for name, machine in job.machines.items():
        for local in range(2):
            machine.start_worker(f"worker {name}.{local}")
    job.until(lambda state: state.phase == Phase.AGREEING)
    yield job
    job.close()


def kinds(job: RelayedJob, since: int) -> Counter[str]:
    """How many blocks hold events of each kind."""
    return Counter(
        kind for block in job.log.blocks()[since:] for kind in {type(s.event).__name__ for s in block}
    )


def report(job: RelayedJob) -> list[threading.Thread]:
    """All living workers report at once, each from a thread of its own."""
    threads = []
    for slot, machine in enumerate(job.machines.values()):
        for local, worker in enumerate(() if machine.is_dead else machine.workers):
            event = ev.StatusReported(rank=2 * slot + local, generation=1, iteration=None)
            threads.append(threading.Thread(target=worker.append, args=(event,), daemon=True))
            threads[-1].start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    """All that was reported has arrived, as those see who reported it."""
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()


def test_a_phase_costs_one_block(job: RelayedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it takes: what is complete is passed on, and no linger ends before."""
    monkeypatch.setattr(merging, "LINGER_S", 60.0)
    monkeypatch.setattr(timings, "EVENT_ALLOWED_S", 60.0)
    wait_until(lambda: job.machines["m5"].upstream.head and job.machines["m3"].upstream.head, "the heads")
    wait_until(lambda: sum(m.upstream.head is None for m in job.machines.values()) == 1, "one head")
    before = len(job.log.texts)
    reports = report(job)
    job.until(lambda state: state.phase not in (Phase.FORMING, Phase.AGREEING))
    join(reports)
    assert kinds(job, before)["StatusReported"] == 1


def test_only_the_highest_head_reads_from_the_store(job: RelayedJob) -> None:
    wait_until(
        lambda: sum(machine.upstream.head is None for machine in job.machines.values()) == 1, "one head"
    )
    assert {m.name: m.upstream.head for m in job.machines.values()} == {
        "m0": None,
        "m1": "m0",
        "m2": "m0",
        "m3": "m2",
        "m4": "m0",
        "m5": "m4",
    }


@pytest.mark.parametrize("victim", ["m0", "m2", "m4"])
def test_a_head_dies_with_what_it_holds(victim: str, job: RelayedJob) -> None:
    job.machines[victim].kill()
    reports = report(job)
    expected = {
        2 * slot + local for slot, name in enumerate(job.machines) if name != victim for local in range(2)
    }
    job.until(lambda state: expected <= set(state.round.statuses))
    join(reports)
    sequencer, counted = Sequencer(), Counter[int]()
    for block in job.log.blocks():
        sequencer, entries = sequencer.admit_all(block)
        counted.update(e.event.rank for e in entries if isinstance(e.event, ev.StatusReported))
    assert all(counted[rank] == 1 for rank in expected)


def test_notes_of_all_workers_are_written_by_the_highest_head(job: RelayedJob) -> None:
    for name, machine in job.machines.items():
        for local, journal in enumerate(machine.journals):
            journal.note(f"{name}.{local}", {"iteration": 1})
            journal.note(f"{name}.{local}", {"iteration": 2})
    expected = {f"{name}.{local}": 2 for name in job.machines for local in range(2)}

    def newest() -> dict[str, int]:
        return {key: facts["iteration"] for _, notes in job.written for key, facts in notes.items()}

    wait_until(lambda: newest() == expected, lambda: str(newest()))
    assert {machine for machine, _ in job.written} == {"m0"}


def test_a_lost_head_takes_no_notes_with_it(job: RelayedJob) -> None:
    """Those below send all that they know again, on their new way."""
    job.machines["m3"].journals[0].note("m3.0", {"iteration": 7})
    wait_until(lambda: any("m3.0" in notes for _, notes in job.written), "the first note")
    job.written.clear()
    job.machines["m2"].kill()
    wait_until(lambda: any("m3.0" in notes for _, notes in job.written), "the note, once more")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_journal_that_is_read_no_more_ends_waits_and_repetitions() -> None:
    """An error in whoever follows the journal is not a silent store: nothing that is appended comes back."""
    log, now = MemoryLog(), [0.0]
    sent = outgoing.Outgoing(lambda: now[0])
    relay = Relay(Upstream(Journal(log, by="m0"), None, sent), sent, by="m0", append_s=600.0)

    def fail(*_: object) -> None:
        raise ValueError("a mistake")

    follower = Follower(relay, on_change=fail)
    follower.start()
    relay.append(ev.JobOpened(machines=1))
    assert follower.has_ended(60.0)
    with pytest.raises(RendezvousLostError, match="a mistake"):
        relay.append(ev.MachineJoined(machine="m0"))
    now[0] = 3600.0
    assert sent.all()
    assert not sent.is_overdue()
    relay.close()


class LosableLog(MemoryLog):
    """In a store that may be lost: then nothing can be written."""

    is_lost = False

    def append(self, text: str, name: str) -> None:
        if self.is_lost:
            raise RendezvousLostError("nobody answers")
        super().append(text, name)


def test_what_a_lost_store_has_not_taken_arrives_once_it_is_there_again() -> None:
    """Who waits meanwhile hears of it: this ends no wait that comes later."""
    log, now = LosableLog(), [0.0]
    sent = outgoing.Outgoing(lambda: now[0])
    relay = Relay(Upstream(Journal(log, by="m0"), None, sent), sent, by="m0", append_s=60.0)
    follower = Follower(relay)
    follower.start()
    relay.append(ev.JobOpened(machines=2))
    log.is_lost = True
    with pytest.raises(RendezvousLostError, match="cannot be written: nobody answers"):
        relay.append(ev.MachineJoined(machine="m0"))
    log.is_lost, now[0] = False, 3600.0
    wait_until(lambda: "m0" in follower.state.membership.spares, "the event that was lost")
    relay.append(ev.MachineJoined(machine="m1"))
    assert not sent.all()
    relay.close()
    log.close()


def test_a_way_to_a_store_that_is_lost_ends_no_reader() -> None:
    """A machine whose head has died goes to the store, and sends what it has not seen arrive."""
    log = LosableLog()
    sent = outgoing.Outgoing()
    upstream = Upstream(Journal(log, by="m0"), None, sent, meets=True)
    stamper = outgoing.Stamper("m0")
    upstream.pass_on(stamper.stamp([ev.JobOpened(machines=1)]))
    log.is_lost = True
    upstream.meet(None)
    assert upstream.read(1, 0.1) is None
    assert len(sent.all()) == 1
