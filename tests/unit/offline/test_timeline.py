"""Where the time of a run went, counted by hand: one event a second (tests/support/journals.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_ft.checkpoint.worker_history import GenerationWork
from swift_ft.coordination.archive import JournalArchive
from swift_ft.errors import UsageError
from swift_ft.offline.lost_time import Cause
from swift_ft.offline.run_store import open_run_store
from swift_ft.offline.timeline import RunTimeline, run_timeline
from swift_ft.recovery import events as ev
from swift_ft.storage.store import Store
from tests.support.journals import (
    BEGAN,
    ENDED,
    FIRST_WORK,
    RECOVERED,
    RUN,
    entries_of,
    machine,
    store_with,
    work_of_recovered,
    write_history,
)


def made(folder: Path, events: list[ev.Event], *, noted: bool = True) -> Store:
    store = store_with(str(folder), events, machines=2)
    if noted:
        work_of_recovered(store)
    return store


def read(folder: Path) -> RunTimeline:
    return run_timeline(open_run_store(str(folder)))


def lost(timeline: RunTimeline) -> dict[str, float | None]:
    return {
        one.cause.name: one.seconds if one.seconds is None else round(one.seconds, 6)
        for one in timeline.goodput.lost
    }


NONE = dict.fromkeys((cause.name for cause in Cause), 0.0)


def test_a_replay(tmp_path: Path) -> None:
    made(tmp_path, [*RECOVERED, *ENDED])
    found = read(tmp_path)
    assert (found.ok, found.reason, found.phase) == (True, "finished", "ended")
    assert (found.began, found.until, found.entries) == (BEGAN, BEGAN + 17, 18)
    assert lost(found) == {
        **NONE,
        "STARTING": 5.75,  # worker 1 begins its first step then
        "AGREEING": 2.0,
        "REBUILDING": 2.0,
        "REGROUPING": 0.5,
        "INTERRUPTED": 0.6,
        "HELD_BACK": 0.25,
        "SAVING": 0.1,
        "ENDING": 2.0,
    }
    assert found.goodput.wall_s == 17
    assert found.goodput.training_s == pytest.approx(3.8)
    assert found.goodput.share == pytest.approx(3.8 / 17)
    assert not found.goodput.at_most
    (report,) = found.recoveries
    assert (report.recovery.mode, report.recovery.slots, report.recovery.resume) == ("replay", [1], 4)
    assert report.seconds == {Cause.AGREEING: 2.0, Cause.REBUILDING: 2.0, Cause.REGROUPING: 0.5}
    assert (report.total_s, report.back) == (4.5, BEGAN + 13.5)
    assert [(one.iteration, one.at) for one in found.checkpoints] == [(0, BEGAN + 8)]
    assert (found.problems, found.unknown) == ((), ())


def test_what_workers_did_in_all_their_processes(tmp_path: Path) -> None:
    made(tmp_path, [*RECOVERED, *ENDED])
    first, second = read(tmp_path).totals
    assert (first.steps, first.iteration, first.log_bytes, first.log_messages) == (5, 5, 5000, 40)
    assert (first.held_back_s, first.saving_s, first.known, first.at_least) == (0.25, 0.1, True, False)
    assert (second.steps, second.iteration, second.log_bytes, second.slot) == (3, 5, 500, 1)
    assert (second.replayed, second.replay_s, second.known, second.at_least) == (4, 1.5, True, True)


def test_a_fallback(tmp_path: Path) -> None:
    failed: list[ev.Event] = [
        ev.ReplayFailed(rank=1, generation=2, reason="the log is torn"),  # 12: instead of going live
        ev.StatusReported(rank=1, generation=3, iteration=None, stages=(1,), holds=("stage 1",), group=1),
        ev.StatusReported(
            rank=0, generation=3, iteration=4, live=True, stages=(0,), holds=("stage 0",), group=0
        ),  # 14
        ev.WorkerReady(rank=0, generation=3),  # 15
        ev.WorkerReady(rank=1, generation=3),  # 16: live
        ev.JobClosed(reason="enough"),  # 17
    ]
    store = made(tmp_path, [*RECOVERED[:12], *failed], noted=False)
    write_history(store, 0, FIRST_WORK)
    found = read(tmp_path)
    (report,) = found.recoveries
    assert (report.recovery.mode, report.recovery.iterations_lost) == ("fallback", {0: 4})
    assert report.seconds == {Cause.AGREEING: 4.0, Cause.REBUILDING: 3.0}
    assert report.back is None  # no worker noted a step in generation 3
    again = next(one for one in found.goodput.lost if one.cause == Cause.AGAIN)
    assert again.estimated
    assert again.seconds == pytest.approx(8.3 - 5.5 - 0.25 - 0.1)  # as long as the four steps had taken
    assert found.goodput.at_most
    assert "in generation 3, when steps began" in found.unknown[0]


def test_nobody_noted_anything(tmp_path: Path) -> None:
    """All workers were killed before their first notes."""
    made(tmp_path, [*RECOVERED, *ENDED], noted=False)
    found = read(tmp_path)
    assert lost(found) == {
        **NONE,
        "STARTING": 5.0,
        "AGREEING": 2.0,
        "REBUILDING": 2.0,
        "REGROUPING": None,
        "INTERRUPTED": None,
        "HELD_BACK": None,
        "SAVING": None,
        "ENDING": 2.0,
    }
    assert found.goodput.training_s == pytest.approx(6.0)
    assert found.goodput.at_most
    assert not any(worker.known for worker in found.totals)
    assert "in generations 1, 2, when steps began" in found.unknown[0]


def test_a_run_without_recoveries(tmp_path: Path) -> None:
    store = store_with(str(tmp_path), RECOVERED[:9], machines=2)
    work = GenerationWork(1, began=BEGAN + 5.5, until=BEGAN + 30, steps=20, iteration=20)
    for rank in (0, 1):
        write_history(store, rank, work)
    found = read(tmp_path)
    assert found.recoveries == ()
    assert found.ok is None  # it still goes on
    assert found.until == BEGAN + 30  # the last sign of life
    assert lost(found) == {**NONE, "STARTING": 5.5}
    assert found.goodput.training_s == pytest.approx(24.5)
    assert found.unknown == ("what happened after the last sign of life: no end of this run is archived",)
    assert all(worker.at_least for worker in found.totals)


def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    made(tmp_path, [*RECOVERED, ev.JobClosed(reason="stopped by SIGTERM")])
    found = read(tmp_path)
    assert (found.ok, found.reason, found.ended) == (False, "stopped by SIGTERM", BEGAN + 14)
    assert [(worker.steps, worker.at_least) for worker in found.totals] == [(5, True), (3, True)]


def test_a_recovery_that_goes_on(tmp_path: Path) -> None:
    made(tmp_path, RECOVERED[:12])
    (report,) = read(tmp_path).recoveries
    assert (report.recovery.live, report.back) == (None, None)
    assert report.seconds == {Cause.AGREEING: 2.0, Cause.REBUILDING: 3.0}  # a worker noted something in 14


def test_a_gap_in_the_archive(tmp_path: Path) -> None:
    made(tmp_path, [])
    lost_later = ev.MachineLost(machine=machine(2), reason="gone")
    entries = entries_of([*RECOVERED, lost_later, ev.JobClosed(reason="enough")])
    archive = JournalArchive(Store(tmp_path), RUN)
    archive.write(entries[:8])
    archive.write(entries[10:])
    found = read(tmp_path)
    (problem,) = found.problems
    assert problem.startswith("the entries 8 to 9 of the journal are missing")
    assert found.until == BEGAN + 7  # what comes later is not guessed
    assert found.goodput.wall_s == 7
    assert found.unknown[0].startswith("what follows entry 7 of the journal")
    assert "report 1 lost machines" in found.unknown[0]
    assert (found.ok, found.reason, found.ended) == (False, "enough", BEGAN + 15)


def test_the_beginning_is_missing(tmp_path: Path) -> None:
    made(tmp_path, [*RECOVERED, *ENDED])
    (file,) = tmp_path.glob("runs/*/journal/*")
    file.unlink()
    found = read(tmp_path)
    assert "not archived" in found.problems[0]
    assert (found.goodput.share, found.goodput.wall_s, found.began) == (None, 0.0, None)
    assert found.phase == "unknown"


def test_a_damaged_history_is_named(tmp_path: Path) -> None:
    made(tmp_path, [*RECOVERED, *ENDED])
    (path,) = tmp_path.glob("runs/*/workers/rank-00000*")
    path.write_text(path.read_text().replace('"steps": 4', '"steps": 40'))
    found = read(tmp_path)
    assert [problem.rpartition("/")[2] for problem in found.problems] == [
        "rank-00000.g0001.json does not match its digest"
    ]
    assert not found.totals[0].known
    assert found.totals[1].steps == 3


def test_another_run(tmp_path: Path) -> None:
    made(tmp_path, [*RECOVERED, *ENDED])
    run = open_run_store(str(tmp_path))
    assert run_timeline(run, "job.0-ffffffff").entries == 0
    with pytest.raises(UsageError, match=f"it has job.0-ffffffff, {RUN}"):
        run_timeline(run, "job.9")


def test_files_are_counted(tmp_path: Path) -> None:
    made(tmp_path, [*RECOVERED, *ENDED])
    counts: list[int] = []
    run_timeline(open_run_store(str(tmp_path)), on_file=counts.append)
    assert sum(counts) == 4  # the journal and three histories
