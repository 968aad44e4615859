"""The journal in a real rendezvous store: blocks, writers and readers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from swift_ft.coordination.block_log import BlockGoneError, StoreBlockLog
from swift_ft.coordination.follower import Follower
from swift_ft.coordination.journal import MOST_EVENTS, Journal, Outbox, open_journal
from swift_ft.coordination.store_client import connect
from swift_ft.errors import RendezvousLostError
from swift_ft.recovery import events as ev
from swift_ft.recovery.blocks import Block, Stamped
from swift_ft.recovery.entries import Entry
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from tests.support.journals import read_now
from tests.support.store_processes import StoreProcess, store_process
from tests.support.waiting import wait_until

Connect = Callable[[], RendezvousStore]

_DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def service() -> Iterator[StoreProcess]:
    with store_process() as made:
        yield made


@pytest.fixture
def client(service: StoreProcess, request: pytest.FixtureRequest) -> Connect:
    """Opens clients of a store that is empty for each test."""
    return partial(connect, service.address, request.node.name)


def fault(number: int) -> ev.FaultInjected:
    return ev.FaultInjected(fault=str(number))


def test_a_journal_is_empty_until_something_happens(client: Connect) -> None:
    journal = open_journal(client, by="a")
    assert journal.is_empty()
    journal.append(fault(1))
    assert not journal.is_empty()
    assert not open_journal(client, by="b").is_empty()


def test_two_writers_never_share_a_number(client: Connect) -> None:
    journals = [open_journal(client, by=name) for name in "ab"]
    for number in range(20):
        journals[number % 3 % 2].append(fault(number))
    entries = [*read_now(journals[0])]
    assert [entry.position for entry in entries] == [*range(20)]
    assert [entry.event for entry in entries] == [fault(number) for number in range(20)]
    assert {entry.by for entry in entries} == {"a", "b"}


def test_a_block_that_is_not_there_is_waited_for_until_the_deadline(client: Connect) -> None:
    log = StoreBlockLog(client())
    assert log.read(0, 0.0) is None
    assert log.read(0, 0.05) is None
    writer = threading.Timer(0.05, log.append, ("text", "name"))
    writer.start()
    assert log.read(0, _DEADLINE_S) == b"text"
    writer.join()


def test_a_follower_applies_each_event_of_a_block(client: Connect) -> None:
    journal = open_journal(client, by="a")
    journal.append(ev.JobOpened(machines=2), ev.MachineJoined(machine="a"), ev.MachineJoined(machine="b"))
    assert journal.read(1, 0.0) is None, "it is one block"
    seen: list[Entry] = []
    follower = Follower(journal, on_entries=seen.extend)
    assert follower.state.generation == 1
    follower.start()
    state = follower.append(ev.MachineLost(machine="a", reason="silent"))
    assert state.slot_of("a") is None
    assert [entry.position for entry in seen] == [0, 1, 2, 3]


def test_an_event_that_was_written_twice_counts_once(client: Connect) -> None:
    journal, other = open_journal(client, by="a"), open_journal(client, by="b")
    stamped = journal.append(ev.JobOpened(machines=1))
    other.pass_on((stamped, Stamped(fault(1), 1.0, "c", "origin", 1)))
    other.pass_on((Stamped(fault(1), 1.0, "c", "origin", 1),))
    assert [entry.event for entry in read_now(journal)] == [ev.JobOpened(machines=1), fault(1)]


def test_readers_of_deleted_blocks_are_told(client: Connect) -> None:
    journal = open_journal(client, by="a")
    for number in range(10):
        journal.append(fault(number))
    log = journal.log
    log.delete_before(7)
    assert log.first() == 7
    for reader in (log, StoreBlockLog(client())):
        with pytest.raises(BlockGoneError):
            reader.read(6, _DEADLINE_S)
        assert reader.read(7, 0.0) is not None
    assert not client().check(["journal/6"])
    log.delete_before(3)
    assert log.first() == 7, "it never decreases"
    assert not open_journal(client, by="b").is_empty()


def test_what_a_process_that_died_has_not_deleted_is_deleted_by_the_next_one(client: Connect) -> None:
    journal, store = open_journal(client, by="a"), client()
    for number in range(5):
        journal.append(fault(number))
    store.set("journal/first", "3")  # and then it died
    journal.log.delete_before(4)
    assert [store.check([f"journal/{number}"]) for number in range(5)] == [False] * 4 + [True]


def test_a_writer_that_was_frozen_does_not_write_where_others_have_deleted(client: Connect) -> None:
    journal, frozen = open_journal(client, by="a"), open_journal(client, by="frozen")
    frozen.append(fault(0))  # its next number is 1
    for number in range(1, 10):
        journal.append(fault(number))
    journal.log.delete_before(8)
    frozen.append(fault(10))
    assert not client().check(["journal/1"])
    found = [journal.read(number, 0.0) for number in (8, 9, 10, 11)]
    assert [block and block[0].event for block in found] == [fault(8), fault(9), fault(10), None]


def test_the_newest_snapshot_stays(client: Connect) -> None:
    log = StoreBlockLog(client())
    assert log.snapshot() is None
    log.put_snapshot("early", 5)
    assert log.snapshot() == b"early"
    log.put_snapshot("late", 9)
    StoreBlockLog(client()).put_snapshot("frozen", 7)
    assert log.snapshot() == b"late"
    store = client()
    assert [store.check([f"journal/snapshot/{number}"]) for number in (5, 7, 9)] == [False, False, True]


def test_a_journal_that_is_lost_says_so() -> None:
    with store_process() as service:
        journal = open_journal(partial(connect, service.address, "lost"), by="a")
        journal.append(fault(1))
    with pytest.raises(RendezvousLostError, match="does not answer"):
        journal.append(fault(2))
    with pytest.raises(RendezvousLostError, match="does not answer"):
        journal.read(1, _DEADLINE_S)


# ----------------------------------------------------------------------------------------------- the outbox


class Writer:
    """Writes when it is let."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def __call__(self, block: Block) -> None:
        self.begun.set()
        assert self.go_on.wait(_DEADLINE_S)
        self.blocks.append(block)
        if self.error is not None:
            raise self.error


def appended(outbox: Outbox, number: int) -> threading.Thread:
    """A thread that appends; its event is in the queue, or on its way."""
    serial = outbox._serial
    thread = threading.Thread(target=outbox.append, args=(fault(number),))
    thread.start()
    wait_until(lambda: outbox._serial > serial, "the event to be queued")
    return thread


def test_what_comes_while_one_is_written_is_written_together() -> None:
    writer = Writer()
    outbox = Outbox("me", writer)
    threads = [appended(outbox, 0)]
    assert writer.begun.wait(_DEADLINE_S)
    threads += [appended(outbox, number) for number in range(1, 10)]
    writer.go_on.set()
    for thread in threads:
        thread.join(_DEADLINE_S)
    assert [len(block) for block in writer.blocks] == [1, 9]
    stamps = [stamped for block in writer.blocks for stamped in block]
    assert [(stamped.serial, stamped.event) for stamped in stamps] == [(n + 1, fault(n)) for n in range(10)]
    assert {stamped.origin for stamped in stamps} == {outbox.origin}


def test_a_failed_write_is_told_to_all_whose_events_were_in_it() -> None:
    writer = Writer()
    writer.go_on.set()
    writer.error = RendezvousLostError("gone")
    outbox = Outbox("me", writer)
    with pytest.raises(RendezvousLostError, match="gone"):
        outbox.append(fault(1))
    writer.error = None
    assert outbox.append(fault(2)).serial == 2, "the first one may have been written all the same"


def test_no_block_grows_without_a_limit() -> None:
    writer = Writer()
    outbox = Outbox("me", writer)
    threads = [appended(outbox, 0)]
    assert writer.begun.wait(_DEADLINE_S)
    many = [fault(number) for number in range(1, MOST_EVENTS)]
    for size in (1, 2):
        threads.append(threading.Thread(target=outbox.append, args=many))
        threads[-1].start()
        wait_until(partial(lambda size: len(outbox._queue) == size, size), "the block to be queued")
    writer.go_on.set()
    for thread in threads:
        thread.join(_DEADLINE_S)
    assert [len(block) for block in writer.blocks] == [1, MOST_EVENTS - 1, MOST_EVENTS - 1]


def test_events_of_many_threads_and_processes_keep_their_order(client: Connect) -> None:
    """Real journals, real threads: nothing is lost, doubled or out of order."""
    journals = [open_journal(client, by=f"process {number}") for number in range(3)]

    def write(journal: Journal, thread: int) -> None:
        for number in range(30):
            journal.append(ev.FaultInjected(fault=f"{thread}.{number}"))

    threads = [threading.Thread(target=write, args=(journal, t)) for journal in journals for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_DEADLINE_S)
    entries = [*read_now(journals[0])]
    assert len(entries) == 3 * 4 * 30
    for by in {entry.by for entry in entries}:
        told = [entry.event.fault.split(".") for entry in entries if entry.by == by]  # type: ignore[union-attr]
        for t in range(4):
            assert [int(number) for thread_, number in told if thread_ == str(t)] == [*range(30)]
