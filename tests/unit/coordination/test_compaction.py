"""The journal stays short: snapshots, what they cover, and readers of a journal without its beginning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import pytest

from swift_ft.coordination.archive import JournalArchive, JournalArchiver, end_of
from swift_ft.coordination.block_log import StoreBlockLog
from swift_ft.coordination.compaction import ArchivedPosition, Compactor
from swift_ft.coordination.follower import Follower
from swift_ft.coordination.journal import Journal, open_journal
from swift_ft.coordination.journal_reader import Excerpt
from swift_ft.coordination.store_client import connect
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from tests.support.journals import RUN, checkpoint, machine, opening
from tests.support.store_processes import StoreProcess, store_process

Connect = Callable[[], RendezvousStore]

EVERY = 100
MACHINES = 3


class AtOnce(Executor):
    """Runs at once what it is given."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@pytest.fixture(scope="module")
def service() -> Iterator[StoreProcess]:
    with store_process() as made:
        yield made


@pytest.fixture
def client(service: StoreProcess, request: pytest.FixtureRequest) -> Connect:
    """Opens clients of a store that is empty for each test."""
    return partial(connect, service.address, request.node.name)


def follower_of(client: Connect, slot: int, **listeners: Any) -> Follower:
    """The follower of an agent that compacts the journal, if that is its duty. It reads when it is made."""
    compactor = Compactor(
        lambda: StoreBlockLog(client()),
        ArchivedPosition(client()).read,
        lambda: machine(slot),
        AtOnce(),
        every=EVERY,
    )
    return Follower(open_journal(client, by="agent"), on_block=compactor.on_block, **listeners)


def catch_up(follower: Follower) -> State:
    """Read what is there, in this thread."""
    follower._catch_up()
    return follower.state


def train(journal: Journal, checkpoints: range) -> None:
    """A run that saves many checkpoints, worker by worker."""
    for number in checkpoints:
        for event in checkpoint(MACHINES, 10 * number):
            journal.append(event)


def blocks_in(client: Connect, most: int) -> list[int]:
    """The numbers of all blocks that are kept."""
    store = client()
    return [number for number in range(most) if store.check([f"journal/{number}"])]


def test_weeks_of_checkpoints_stay_small(client: Connect) -> None:
    """Thousands of events: few keys, newcomers that read a snapshot, and a slow reader that catches up."""
    ArchivedPosition(client()).note(10**9)
    journal = open_journal(client, by="worker")
    journal.append(*opening(MACHINES))
    agent = follower_of(client, 0)
    excerpt = Excerpt()
    frozen = Follower(
        open_journal(client, by="frozen"), on_entries=excerpt.on_entries, on_snapshot=excerpt.on_snapshot
    )
    assert len(excerpt.entries) == len(opening(MACHINES))
    for number in range(1, 501):
        train(journal, range(number, number + 1))
        catch_up(agent)
    expected = agent.state
    assert expected.checkpoints.committed == 5000

    written = 1 + 500 * (MACHINES + 1)
    kept = blocks_in(client, written + 1)
    assert kept == [*range(kept[0], written)]
    assert len(kept) <= 2 * EVERY, "the last interval, and the one that grows"
    read: list[Entry] = []
    newcomer = Follower(open_journal(client, by="newcomer"), on_entries=read.extend)
    assert newcomer.state == expected
    assert len(read) == len(kept)
    assert [entry.position for entry in read] == [*range(read[0].position, read[-1].position + 1)]
    assert read[-1].position == len(opening(MACHINES)) + 500 * (MACHINES + 1) - 1

    assert catch_up(frozen) == expected
    assert excerpt.began is not None
    assert excerpt.entries == read
    assert frozen.append(ev.FaultInjected(fault="x"), timeout_s=0.0) is not None


def test_the_duty_passes_to_the_lowest_slot_that_is_left(client: Connect) -> None:
    ArchivedPosition(client()).note(10**9)
    journal = open_journal(client, by="worker")
    journal.append(*opening(MACHINES))
    agents = [follower_of(client, slot) for slot in range(MACHINES)]
    log = journal.log
    train(journal, range(1, 60))
    for agent in agents[1:]:
        catch_up(agent)
    assert log.snapshot() is None, "the first agent has the duty, and sleeps"
    journal.append(ev.MachineLost(machine=machine(0), reason="silent"))
    train(journal, range(60, 100))
    for agent in agents[1:]:
        catch_up(agent)
    assert log.first() > 0
    assert Follower(journal).state == catch_up(agents[0])


def test_what_is_not_archived_is_not_deleted(client: Connect, tmp_path: Any) -> None:
    """The worker that goes on with the archive finds all that is missing in the journal."""
    archived = ArchivedPosition(client())
    archived.note(0)
    journal = open_journal(client, by="worker")
    journal.append(*opening(MACHINES))
    agent = follower_of(client, 0)
    train(journal, range(1, 100))
    catch_up(agent)
    assert journal.log.first() == 0

    store = Store(str(tmp_path))
    archive = JournalArchive(store, RUN)
    first = JournalArchiver(archive, AtOnce(), archived.note)
    Follower(journal, on_entries=first.on_entries, on_snapshot=first.on_snapshot)
    first.start()
    last = archived.read()
    assert last == end_of(archive.spans()) == len(opening(MACHINES)) + 99 * (MACHINES + 1)
    train(journal, range(100, 200))
    catch_up(agent)
    snapshot = journal.snapshot()
    assert snapshot is not None
    assert 0 < snapshot.sequencer.position <= last

    replacement = JournalArchiver(archive, AtOnce(), archived.note)
    Follower(journal, on_entries=replacement.on_entries, on_snapshot=replacement.on_snapshot)
    replacement.start()
    assert end_of(archive.spans()) == len(opening(MACHINES)) + 199 * (MACHINES + 1)
    entries = {entry.position: entry for span in archive.spans() for entry in archive.read(span)}
    state = State()
    for position in range(len(entries)):
        state = step(state, entries[position].event)
    assert state == catch_up(agent)


@pytest.mark.parametrize("sessions", [False, True])
def test_nobody_archives_for_a_script_without_a_session(client: Connect, sessions: bool) -> None:
    """With one, a worker is about to say that it archives."""
    journal = open_journal(client, by="worker")
    journal.append(*opening(MACHINES)[: None if sessions else 1 + MACHINES])
    for number in range(5 * EVERY):
        journal.append(ev.FaultInjected(fault=str(number)))
    follower_of(client, 0)
    assert (journal.log.first() > 0) is not sessions


def test_the_archived_position_never_decreases(client: Connect) -> None:
    archived = ArchivedPosition(client())
    assert archived.read() is None
    for position, known in ((0, 0), (7, 7), (3, 7), (7, 7), (9, 9)):
        archived.note(position)
        assert archived.read() == known
