"""The archive of the journal: written as a run goes, and read whatever is left of it."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_ft.checkpoint.run_record import RECORD
from swift_ft.checkpoint.store_claim import tidy_store
from swift_ft.coordination import archive as archive_module
from swift_ft.coordination.archive import JournalArchive, JournalArchiver, Span, end_of
from swift_ft.errors import UsageError
from swift_ft.launch.agent.run_end import RunEnd
from swift_ft.offline.archive import read_journal
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.job_state import JobShape, Phase, State, Verdict
from swift_ft.recovery.membership import Membership
from swift_ft.storage.digest import sealed
from swift_ft.storage.store import Store

RUN = "job.1-0a1b2c3d"


class AtOnce(ThreadPoolExecutor):
    """Runs what is submitted before it returns."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


def journal(count: int) -> list[Entry]:
    """A job of two machines, and then one fault after the other."""
    events: list[ev.Event] = [ev.JobOpened(machines=2)]
    events += [ev.MachineJoined(machine=name, address=f"{name}:1") for name in ("A", "B")]
    events += [
        ev.StatusReported(rank=r, generation=1, iteration=None, holds=("the model",), undoable=(1, 2))
        for r in (0, 1)
    ]
    events += [ev.FaultInjected(fault=f"fault {n}") for n in range(count - len(events))]
    return [Entry(n, event, 100.0 + n / 7, "worker 0") for n, event in enumerate(events[:count])]


@pytest.fixture
def archive(tmp_path: Path) -> JournalArchive:
    store = Store(tmp_path)
    store.write_json(RECORD, sealed({"run_id": RUN, "topology": {}, "earlier": []}))
    return JournalArchive(store, RUN)


def files(archive: JournalArchive) -> list[str]:
    return archive.store.list(archive.directory)


def live(generation: int = 1, committed: int | None = None) -> State:
    state = State(phase=Phase.LIVE, generation=generation)
    return replace(state, checkpoints=replace(state.checkpoints, committed=committed))


def archiver_of(archive: JournalArchive, entries: list[Entry]) -> JournalArchiver:
    archiver = JournalArchiver(archive, AtOnce())
    archiver.on_entries(entries)
    return archiver


def test_what_was_archived_is_read_back(archive: JournalArchive) -> None:
    entries = journal(9)
    archive.write(entries[:4])
    archive.write(entries[4:])
    found = read_journal(archive.store, RUN)
    assert (found.entries, found.problems) == (tuple(entries), ())
    assert [change.after.generation for change in found.changes()] == [0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert found.last_state().phase == Phase.LIVE
    assert [dict(data) for data in found.to_dict()["entries"]] == [entry.to_dict() for entry in entries]


def test_the_same_entries_make_the_same_file(archive: JournalArchive) -> None:
    archive.write(journal(5))
    path = archive.store.local_path(f"{archive.directory}/00000000-00000004.json")
    assert path is not None
    before = path.read_bytes()
    archive.write(list(read_journal(archive.store, RUN).entries))
    assert (path.read_bytes(), files(archive)) == (before, [path.name])


def test_files_that_overlap_are_harmless(archive: JournalArchive) -> None:
    entries = journal(9)
    for first, last in ((0, 5), (3, 7), (3, 4), (6, 9), (0, 2)):
        archive.write(entries[first:last])
    found = read_journal(archive.store, RUN)
    assert (found.entries, found.problems) == (tuple(entries), ())
    assert end_of(archive.spans()) == 9


def test_a_gap_is_named_and_ends_the_states(archive: JournalArchive) -> None:
    entries = journal(9)
    archive.write(entries[:3])
    archive.write(entries[5:])
    found = read_journal(archive.store, RUN)
    assert found.entries == (*entries[:3], *entries[5:])
    assert found.problems == (
        "the entries 3 to 4 of the journal are missing (from 1970-01-01 00:01:40 UTC to 1970-01-01 00:01:40 "
        "UTC): who joined, who was lost, and how the run recovered then is unknown",
    )
    assert len(list(found.changes())) == 3
    assert end_of(archive.spans()) == 3


@pytest.mark.parametrize("damage", ["flip", "cut", "foreign"])
def test_damage_is_named_and_what_else_is_there_is_read(archive: JournalArchive, damage: str) -> None:
    entries = journal(9)
    archive.write(entries[:4])
    archive.write(entries[4:6])  # lies within the next one
    span = archive.write(entries[4:9])
    path = archive.store.local_path(f"{archive.directory}/{span.name}")
    assert path is not None
    if damage == "flip":
        path.write_bytes(path.read_bytes().replace(b"fault 2", b"fault 3"))
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        other = JournalArchive(archive.store, "job.2-ffffffff")
        other.write(entries[4:9])
        foreign = archive.store.local_path(f"{other.directory}/{span.name}")
        assert foreign is not None
        path.write_bytes(foreign.read_bytes())
    found = read_journal(archive.store, RUN)
    assert found.entries == tuple(entries[:6])
    (problem,) = found.problems
    assert span.name in problem


def test_a_run_without_an_archive_has_no_entries(archive: JournalArchive) -> None:
    assert read_journal(archive.store, "another").entries == ()


def test_a_store_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / RUN / "journal"
    folder.mkdir(parents=True)
    store = Store(tmp_path, patience_s=0.0)
    store.anchor(RECORD)  # gone
    with pytest.raises(UsageError, match="cannot be read"):
        read_journal(store, "another")


# --------------------------------------------------------------------------------------------- a worker


def test_a_worker_archives_at_each_change(archive: JournalArchive) -> None:
    entries = journal(9)
    archiver = archiver_of(archive, entries[:3])
    archiver.on_change(live())
    assert files(archive) == []  # the store may still be another run's
    archiver.start()
    assert archive.spans() == [Span(0, 2)]
    archiver.on_entries(entries[3:4])
    archiver.on_change(live())
    assert archive.spans() == [Span(0, 2)]  # nothing that matters has changed
    archiver.on_change(live(committed=5))
    assert archive.spans() == [Span(0, 3)]
    archiver.on_change(live(generation=2, committed=5))  # nothing is new
    assert archive.spans() == [Span(0, 3)]


def test_a_full_file_grows_no_more(archive: JournalArchive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "_FULL", 4)
    archiver = archiver_of(archive, [])
    archiver.start()
    for number, entry in enumerate(journal(10)):
        archiver.on_entries([entry])
        archiver.on_change(live(committed=number))
    assert archive.spans() == [Span(0, 3), Span(4, 7), Span(8, 9)]


def test_a_replacement_goes_on_where_the_archive_ends(archive: JournalArchive) -> None:
    entries = journal(9)
    archiver_of(archive, entries[:5]).start()
    archiver_of(archive, entries[:7]).start()
    assert archive.spans() == [Span(0, 4), Span(5, 6)]


def test_an_outage_is_warned_of_once_and_made_up_for(
    archive: JournalArchive, caplog: pytest.LogCaptureFixture
) -> None:
    entries = journal(9)
    folder = archive.store.local_path("runs")
    assert folder is not None
    folder.write_text("in the way")
    hasty = JournalArchive(archive.store.at_once(), RUN)
    with caplog.at_level(logging.WARNING):
        archiver = archiver_of(hasty, entries[:4])
        archiver.start()
        archiver.on_change(live(committed=3))
    assert [record.event for record in caplog.records] == ["archive_failed"]  # type: ignore[attr-defined]
    folder.unlink()
    archiver.on_entries(entries[4:5])
    archiver.on_change(live(committed=6))
    assert read_journal(archive.store, RUN).entries == tuple(entries[:5])


def test_leftovers_of_killed_writers_go(archive: JournalArchive) -> None:
    archive.write(journal(3))
    path = archive.store.local_path(f"{archive.directory}/00000003-00000004.json.abc.tmp")
    assert path is not None
    path.write_text("{")
    record = archive.store.local_path("workers/rank-00002.json.abc.tmp")
    assert record is not None
    record.parent.mkdir()
    record.write_text("{")
    tidy_store(archive.store)
    assert files(archive) == ["00000000-00000002.json"]
    assert not record.exists()


def test_a_run_may_have_any_name(tmp_path: Path) -> None:
    archive = JournalArchive(Store(tmp_path), "../my job: ä/1.1-0a1b2c3d")
    archive.write(journal(2))
    assert archive.directory == "runs/.._my_job____1.1-0a1b2c3d/journal"
    assert read_journal(archive.store, archive.run_id).entries == tuple(journal(2))


# ---------------------------------------------------------------------------------------------- an agent


def ended(*slots: int) -> State:
    members = Membership().members.update({slot: f"m-{slot}" for slot in slots})
    return State(phase=Phase.ENDED, membership=Membership(members=members))


def run_end(archive: JournalArchive, entries: list[Entry], store: str | None = None) -> RunEnd:
    end = RunEnd(RUN)
    end.on_entries(entries)
    end.hear({"store": archive.store.child_url("") if store is None else store})
    return end


def test_an_agent_archives_the_end(archive: JournalArchive) -> None:
    entries = journal(9)
    archive.write(entries[:6])
    run_end(archive, entries).tidy(ended(0, 1), 0, 30.0)
    assert archive.spans() == [Span(0, 5), Span(6, 8)]
    run_end(archive, entries).tidy(ended(0, 1), 1, 30.0)  # the other one has nothing left to write
    assert archive.spans() == [Span(0, 5), Span(6, 8)]


@pytest.mark.parametrize(("slot", "writes"), [(0, False), (2, True), (7, True), (9, False), (None, True)])
def test_the_lowest_living_machines_do_it(archive: JournalArchive, slot: int | None, writes: bool) -> None:
    state = ended(9) if slot == 0 else ended(2, 5, 7, 9)
    if slot == 0:
        state = ended(1, 2, 3, 4)
        slot = 4
    run_end(archive, journal(4)).tidy(state, slot, 30.0)
    assert bool(files(archive)) == writes


def test_an_agent_writes_in_no_other_store(archive: JournalArchive, tmp_path: Path) -> None:
    """Its workers found another run there, or somebody has deleted the store in the meantime."""
    gone = tmp_path / "gone"
    run_end(archive, journal(4), store=str(gone)).archive(30.0)
    assert not gone.exists()
    archive.store.write_json(RECORD, sealed({"run_id": "another", "topology": {}, "earlier": []}))
    run_end(archive, journal(4)).archive(30.0)
    run_end(archive, journal(4), store="").archive(30.0)
    assert files(archive) == []


@pytest.mark.parametrize("ok", [False, True])
def test_what_its_workers_were_writing_goes_where_a_run_fails(archive: JournalArchive, ok: bool) -> None:
    """Not what workers of another machine may be writing still, and nothing that is whole."""
    run, part = f"runs/{RUN}/workers", "checkpoints/00000004/rank-0000{}.g00003"
    own = [f"{run}/rank-00001.g0003.json.ab.tmp", f"{part.format(1)}/.metadata.tmp"]
    others = [f"{run}/rank-00000.g0003.json.ab.tmp", f"{part.format(0)}/.metadata.tmp"]
    whole = [f"{run}/rank-00001.g0002.json", f"{part.format(1)}/data.distcp"]
    for path in (*own, *others, *whole):
        archive.store.write_json(path, {})
    state = replace(ended(0, 1), shape=JobShape(machines=2), verdict=Verdict(ok, "", 1), generation=3)
    run_end(archive, journal(2)).tidy(state, 1, 30.0)
    left = {path for path in (*own, *others, *whole) if archive.store.exists(path)}
    assert left == {*others, *whole, *(own if ok else ())}


def test_begun_segments_go(archive: JournalArchive, tmp_path: Path) -> None:
    log = tmp_path / "log" / "rank-00000"
    log.mkdir(parents=True)
    for name in ("a.arrow", "b.arrow.123.tmp"):
        (log / name).write_text("x")
    end = run_end(archive, [])
    end.hear({"log": str(log)})
    end.tidy(ended(0), 0, 30.0)
    assert [path.name for path in log.iterdir()] == ["a.arrow"]
