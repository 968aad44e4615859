"""A store that was started anew gets back what survivors hold, once, and all of it or nothing that counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination import restoring
from swift_ft.coordination.incarnations import begin, has_begun, incarnation_of
from swift_ft.coordination.journal import Journal, open_journal
from swift_ft.coordination.kept_keys import KeptKeys
from swift_ft.coordination.restoring import JournalCopy, Restorer, Roster
from swift_ft.coordination.runs import find_run, newest_run, restore_newest
from swift_ft.coordination.store_client import connect
from swift_ft.errors import FencedError, NotRestoredError, RendezvousLostError
from swift_ft.recovery import events as ev
from swift_ft.recovery.blocks import Sequencer
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.snapshot import JournalSnapshot
from swift_ft.torch_adapters.rendezvous_store import TCPStore, serve_store
from tests.support.journals import RUN
from tests.support.waiting import wait_until

MACHINES = ("m0", "m1", "m2")


class Stores:
    """A store at one address, which can be lost, and started anew."""

    def __init__(self) -> None:
        self._served: TCPStore | None = serve_store("127.0.0.1", 0)
        self.address = StoreAddress.tcp("127.0.0.1", self._served.port)

    def lose(self) -> None:
        self._served = None

    def start(self) -> None:
        self._served = serve_store("127.0.0.1", self.address.port)


class Machine:
    """What one machine holds: the first blocks of a journal, and keys."""

    def __init__(self, name: str, stores: Stores) -> None:
        self.name = name
        self.copy, self.kept = JournalCopy(), KeptKeys()
        self.lost: Collection[str] = ()
        self.fenced: Collection[str] = ()
        self.restorer = Restorer(
            self.copy,
            self.kept,
            lambda: Roster(name, MACHINES, (), self.fenced, self.lost),
            gather_s=0.0,
            place="the store",
        )
        self.store = connect(stores.address, RUN, timeout_s=30.0, silence_s=30.0, admit=self.restorer.admit)
        self.store.on_set = self.kept.put

    def outlives_all_others(self) -> None:
        """They are lost, and it has their keys."""
        for other in MACHINES:
            self.kept.put_machine(other)
        self.lost = MACHINES[1:]

    def read(self, journal: Journal, blocks: int) -> None:
        epoch = self.copy.epoch(0.0)
        assert epoch is not None
        for number in range(self.copy.end, blocks):
            text = journal.log.read(number, 10.0)
            assert text is not None
            assert self.copy.take(number, text.decode() if isinstance(text, bytes) else text, epoch)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    monkeypatch.setattr(restoring, "_LEAST_GATHER_S", 1.0)
    monkeypatch.setattr(restoring, "_KEYS_S", 1.0)
    made = Stores()
    begin(connect(made.address, RUN))
    yield made
    made.lose()


def journal_in(stores: Stores) -> Journal:
    return open_journal(partial(connect, stores.address, RUN, admit=has_begun), by="test")


def fault(number: int) -> ev.Event:
    return ev.FaultInjected(fault=str(number))


def written(stores: Stores, blocks: int) -> Journal:
    journal = journal_in(stores)
    for number in range(blocks):
        journal.append(fault(number))
    return journal


def faults_in(journal: Journal) -> list[str]:
    found: list[str] = []
    while (block := journal.read(len(found), 0.0)) is not None:
        found += [stamped.event.fault for stamped in block if isinstance(stamped.event, ev.FaultInjected)]
    return found


def in_threads(*acts: Callable[[], Any]) -> list[Any]:
    """What they return or raise, when all have ended."""
    with ThreadPoolExecutor(len(acts)) as threads:
        futures = [threads.submit(act) for act in acts]
        return [future.exception() or future.result() for future in futures]


def touch(machine: Machine) -> bool:
    return machine.store.check(["anything"])


def test_the_one_that_has_read_furthest_republishes(stores: Stores, caplog: pytest.LogCaptureFixture) -> None:
    """All that survivors hold is there again, under numbers that go on."""
    journal = written(stores, 6)
    machines = [Machine(name, stores) for name in MACHINES]
    for machine, blocks in zip(machines, (4, 6, 5), strict=True):
        machine.read(journal, blocks)
        machine.store.set(f"of/{machine.name}", machine.name)
    before = incarnation_of(machines[0].store.underlying) or None
    stores.lose()
    stores.start()
    assert in_threads(*(partial(touch, machine) for machine in machines)) == [False] * 3
    restored = journal_in(stores)
    assert faults_in(restored) == [str(number) for number in range(6)]
    restored.append(fault(6))
    for machine in machines:
        machine.read(restored, 7)
    client = connect(stores.address, RUN, admit=has_begun)
    assert client.check([f"of/{name}" for name in MACHINES])
    assert incarnation_of(client._own) not in ("", before)
    assert [r.__dict__.get("event") for r in caplog.records].count("store_restored") == 1


def test_a_machine_that_comes_late_and_has_read_less_goes_on(stores: Stores) -> None:
    journal = written(stores, 3)
    first, second, late = (Machine(name, stores) for name in MACHINES)
    late.store.set("of/late", "1")
    for machine, blocks in ((first, 3), (second, 3), (late, 2)):
        machine.read(journal, blocks)
    stores.lose()
    stores.start()
    second.kept.hold(late.name, {"of/late": "1"}, anew=True)  # else what it had set would be missed
    assert in_threads(partial(touch, first), partial(touch, second)) == [False, False]
    assert late.store.check(["of/late"])
    late.read(journal_in(stores), 3)
    assert late.copy.end == 3


def test_a_machine_that_comes_late_and_has_read_more_is_fenced(stores: Stores) -> None:
    """What it did after that is not what the others go on with."""
    journal = written(stores, 3)
    first, second, late = (Machine(name, stores) for name in MACHINES)
    for machine, blocks in ((first, 2), (second, 2), (late, 3)):
        machine.read(journal, blocks)
    second.kept.hold(late.name, {}, anew=True)
    stores.lose()
    stores.start()
    assert in_threads(partial(touch, first), partial(touch, second)) == [False, False]
    with pytest.raises(FencedError, match="It has read up to block 3"):
        touch(late)
    with pytest.raises(FencedError):  # nor does its follower go on
        late.copy.epoch(0.0)


def test_two_that_race_do_not_mix(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes itself for the only one that is left. The first incarnation counts, for both."""
    journal = written(stores, 4)
    racing = [Machine(name, stores) for name in MACHINES[:2]]
    racing[0].read(journal, 4)
    racing[1].read(journal, 4)
    for machine in racing:
        machine.lost = MACHINES
        for other in MACHINES:
            machine.kept.put_machine(other)
    together = threading.Barrier(2)

    def furthest(_self: Restorer, _store: Any, own: str, *_: Any) -> str:
        together.wait(10.0)
        return own

    monkeypatch.setattr(Restorer, "_furthest", furthest)
    stores.lose()
    stores.start()
    assert in_threads(*(partial(touch, machine) for machine in racing)) == [False, False]
    assert faults_in(journal_in(stores)) == ["0", "1", "2", "3"]
    assert racing[0].restorer._known == racing[1].restorer._known


def test_what_a_lost_machine_had_set_comes_from_its_holder(stores: Stores) -> None:
    journal = written(stores, 1)
    first, second, lost = (Machine(name, stores) for name in MACHINES)
    for machine in (first, second, lost):
        machine.read(journal, 1)
    lost.store.set("shapes", "8x32")
    first.kept.hold(lost.name, lost.kept.take_all(), anew=True)
    first.lost = second.lost = (lost.name,)
    stores.lose()
    stores.start()
    assert in_threads(partial(touch, first), partial(touch, second)) == [False, False]
    assert connect(stores.address, RUN, admit=has_begun).get("shapes") == b"8x32"


@pytest.mark.parametrize("how", ["in its place", "replaced long ago"])
def test_without_what_a_lost_machine_had_set_the_run_ends(
    how: str, stores: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    """One clear line, for all, at once."""
    journal = written(stores, 1)
    machines = [Machine(name, stores) for name in MACHINES]
    for machine in machines:
        machine.read(journal, 1)
        machine.lost = MACHINES[2:] if how == "in its place" else ()
        machine.fenced = () if how == "in its place" else ("m9",)
    here = machines[:2] if how == "in its place" else machines
    stores.lose()
    stores.start()
    errors = in_threads(*(partial(touch, machine) for machine in here))
    assert [type(error) for error in errors] == [NotRestoredError] * len(here)
    assert "start the run again with --resume" in str(errors[0])
    with pytest.raises(NotRestoredError):
        connect(stores.address, RUN, admit=has_begun)
    assert [r.__dict__.get("event") for r in caplog.records].count("store_not_restored") == 1


def test_events_that_nobody_has_read_come_first_again(stores: Stores) -> None:
    """The first append into a new store tells its caller, which knows what has not come back."""
    from swift_ft.coordination.block_log import StoreRenewedError

    journal = written(stores, 2)
    machine = Machine("m0", stores)
    machine.read(journal, 1)
    machine.outlives_all_others()
    log = open_journal(
        partial(connect, stores.address, RUN, silence_s=30.0, admit=machine.restorer.admit), by="test"
    ).log
    log.append("a", "a")
    stores.lose()
    stores.start()
    with pytest.raises(StoreRenewedError):
        log.append("b", "b")
    log.append("a", "a")
    log.append("b", "b")
    assert log.read(1, 10.0) == b"a"
    assert log.read(2, 10.0) == b"b"


def test_a_store_that_no_machine_restores_is_lost(stores: Stores) -> None:
    client = connect(stores.address, RUN, timeout_s=0.5, silence_s=0.5, admit=has_begun)
    stores.lose()
    stores.start()
    with pytest.raises(RendezvousLostError, match="--resume"):
        client.check(["anything"])


def test_a_copy_begins_with_what_the_store_may_begin_with(stores: Stores) -> None:
    """And newcomers read it from there."""
    journal = written(stores, 5)
    machine = Machine("m0", stores)
    machine.read(journal, 5)
    machine.outlives_all_others()
    machine.copy.drop_before(JournalSnapshot(State(), Sequencer(), 3))
    machine.copy.drop_before(JournalSnapshot(State(), Sequencer(), 9))  # it has not read so far
    stores.lose()
    stores.start()
    touch(machine)
    restored = journal_in(stores)
    assert restored.log.first() == 3
    snapshot = restored.snapshot()
    assert snapshot is not None
    assert snapshot.number == 3
    assert restored.log.read(4, 10.0) is not None
    assert restored.log.read(5, 0.0) is None


def test_blocks_of_the_store_before_are_not_taken_for_those_of_the_new_one(stores: Stores) -> None:
    copy = JournalCopy()
    epoch = copy.epoch(0.0)
    assert epoch is not None
    assert copy.take(0, "a", epoch)
    assert copy.seal() == 1
    assert copy.epoch(0.0) is None
    assert not copy.take(1, "of the store before", epoch)
    copy.unseal()
    assert not copy.take(1, "of the store before", epoch)
    now = copy.epoch(0.0)
    assert now is not None
    assert copy.take(1, "of the new store", now)
    assert copy.end == 2


def test_a_launcher_that_came_first_does_not_begin_another_run(stores: Stores) -> None:
    """It found the store empty. Its run ends with one line, and the next launchers find the old one."""
    client = partial(connect, stores.address)
    run = find_run(client, "job")
    stores.lose()
    stores.start()
    mistaken = find_run(client, "job")
    assert mistaken != run
    journal = open_journal(partial(client, mistaken), by="test")
    journal.append(ev.JobOpened(machines=1, checkpoint=None))
    restore_newest(run, client(run)._own)
    restore_newest(run, client(run)._own)  # by another machine
    assert newest_run(client, "job") == run
    from swift_ft.coordination.follower import Follower

    state = Follower(journal).state
    assert state.phase == Phase.ENDED
    assert state.verdict is not None
    assert f"run {run} goes on in it" in state.verdict.reason


def test_waits_end_when_the_store_is_restored(stores: Stores) -> None:
    """A wait that was under way when the store was lost is one in the new store."""
    machine = Machine("m0", stores)
    machine.read(written(stores, 1), 1)
    machine.outlives_all_others()
    found: list[bytes] = []
    waiter = threading.Thread(target=lambda: found.append(machine.store.get("awaited")))
    waiter.start()
    stores.lose()
    stores.start()
    machine.store.set("awaited", "here")
    wait_until(lambda: bool(found), "the value")
    waiter.join(10.0)
    assert found == [b"here"]
