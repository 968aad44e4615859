"""What a recovery waited for, from its journal and what processes recorded: one event a second."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from swift_ft.checkpoint.recording_file import StoredRecording
from swift_ft.checkpoint.worker_files import WorkerFiles
from swift_ft.observe.spans import FIRST_ITERATION, Recording, Span
from swift_ft.offline.recovery_spans import (
    PlacedSpan,
    TracedRecovery,
    _own_times,
    read_recordings,
    trace_recoveries,
)
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.history import History
from swift_ft.storage.store import Store
from tests.support.journals import BEGAN, RECOVERED, RUN, machine

S = 1_000_000_000
LOSS, LIVE = 9, 13
SKEW = 500 * S
"""How much the clock of host B is ahead of that of host A, on which second 0 is the first event's."""
AUTHORS = {
    LOSS: "agent m-0",
    10: "worker 1",
    11: "worker 0",
    12: "worker 0",
    13: "worker 1",
}


def journal() -> list[Entry]:
    return [Entry(n, event, BEGAN + n, AUTHORS.get(n, "worker 0")) for n, event in enumerate(RECOVERED)]


def stored(by: str, spans: list[tuple[str, float, float]], *, late: int = 0) -> StoredRecording:
    """Of a process on host A, or on host B, which sees each entry that many seconds late."""
    on_b = by == "worker 1" or by == "agent m-2"
    skew = SKEW if on_b else 0
    own = [(p, p * S + skew) for p, author in AUTHORS.items() if author == by]
    seen = [(p, p, (p + late) * S + skew) for p in range(LOSS, 14)]
    began = min(round(begin * S) for _, begin, _ in spans) + skew
    recording = Recording(
        began,
        20 * S + skew,
        round(BEGAN * S) + began - skew,
        tuple(Span(name, round(b * S) + skew, round(e * S) + skew, "", {}) for name, b, e in spans),
        tuple(seen),
        tuple(own),
        0,
    )
    rank = int(by[-1]) if by.startswith("worker") else None
    place = (machine(2), 1) if on_b else (machine(0), 0)
    return StoredRecording(RUN, 2, by, rank, *place, "B" if on_b else "A", recording)


def recordings(late: int = 0) -> list[StoredRecording]:
    return [
        stored("agent m-0", [("detect", 8.5, 9)]),
        stored("agent m-2", [("start workers", 9.25, 10)], late=late),
        stored(
            "worker 0",
            [("wake", 9, 9.5), ("go live", 13, 16.5), ("connect", 15, 16), (FIRST_ITERATION, 16.5, 17)],
        ),
        stored(
            "worker 1",
            [
                ("script", 9.5, 9.75),
                ("report", 9.75, 10),
                ("task", 11, 13),
                ("load", 11, 11.5),
                ("connect", 14, 15.5),
                (FIRST_ITERATION, 15.5, 18),
            ],
            late=late,
        ),
    ]


def traced_in(entries: list[Entry], found: list[StoredRecording]) -> dict[int, TracedRecovery]:
    return trace_recoveries(History.of(entries).courses, found)


def traced(found: list[StoredRecording]) -> TracedRecovery:
    return traced_in(journal(), found)[2]


def test_the_path_ends_each_part_with_the_last_one() -> None:
    found = traced(recordings())
    assert (found.generation, found.missing) == (2, ())
    assert found.zero == pytest.approx(BEGAN + LOSS)
    parts = [(part.name, part.by, part.began_ms, part.ms) for part in found.path]
    assert parts == [
        ("detect", "agent m-0", -500.0, 500.0),
        ("report", "worker 0", 0.0, 2000.0),
        ("rebuild", "worker 1", 2000.0, 2000.0),
        ("gather", "worker 0", 4000.0, 2000.0),
        ("connect", "worker 0", 6000.0, 1000.0),
        ("go live", "worker 0", 7000.0, 500.0),
        ("first iteration", "worker 1", 7500.0, 1500.0),
    ]
    by_name = {part.name: part.spans for part in found.path}
    assert by_name["detect"] == {"detect": 500.0}
    assert by_name["rebuild"] == {"task": 1500.0, "load": 500.0}  # which is within the task
    assert by_name["go live"] == {"go live": 500.0}
    assert by_name["first iteration"] == {FIRST_ITERATION: 1500.0}


def test_before_a_worker_was_started_its_agent_did_something_for_it() -> None:
    entries = journal()
    last = entries[10]  # worker 1 reports last: 10 and 11 change places
    entries[10] = Entry(10, entries[11].event, BEGAN + 10, "worker 0")
    entries[11] = Entry(11, last.event, BEGAN + 11, "worker 1")
    found = recordings()
    (report,) = (part for part in traced_in(entries, found)[2].path if part.name == "report")
    assert report.by == "worker 1"
    assert report.spans == {"start workers": 250.0, "script": 250.0, "report": 250.0}


def test_another_clock_is_as_wrong_as_the_journal_cannot_tell() -> None:
    found = traced(recordings(late=0))
    assert {one.uncertainty_ms for one in found.participants} == {0.0}
    late = traced(recordings(late=1))
    by_name = {one.by: one for one in late.participants}
    assert by_name["worker 0"].uncertainty_ms == 0
    uncertainty = by_name["worker 1"].uncertainty_ms
    assert uncertainty == 500.0
    (load,) = (span for span in by_name["worker 1"].spans if span.name == "load")
    assert abs(load.began_ms - 2000) <= uncertainty


def test_a_fault_that_was_injected_begins_it() -> None:
    entries = journal()
    entries.insert(LOSS, Entry(LOSS, ev.FaultInjected(fault="kill"), BEGAN + 8.25, "worker 1"))
    entries = [Entry(n, entry.event, entry.at, entry.by) for n, entry in enumerate(entries)]
    path = traced_in(entries, [])[2].path  # the journal alone: nothing was recorded
    assert [part.name for part in path] == ["detect", "report", "rebuild"]
    assert [part.ms for part in path] == pytest.approx([750.0, 2000.0, 2000.0])
    assert not any(part.spans for part in path)


def test_a_process_that_was_lost_is_missing() -> None:
    found = traced([one for one in recordings() if one.by != "worker 1"])
    assert found.missing == (1,)
    assert [part.name for part in found.path][-1] == "first iteration"


def test_a_recovery_that_did_not_end_is_left_out() -> None:
    assert traced_in(journal()[:LIVE], recordings()) == {}


def test_damaged_files_are_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for one in recordings():
        WorkerFiles(store, RUN).write(one.file, asdict(one))
    (torn,) = tmp_path.glob("runs/*/workers/rank-00001*")
    torn.write_text("{}")
    found, problems = read_recordings(store, RUN, [2])
    assert sorted(one.by for one in found) == ["agent m-0", "agent m-2", "worker 0"]
    (problem,) = problems
    assert "rank-00001.g0002.trace.json" in problem
    assert read_recordings(store, RUN, [3]) == ([], [])


def test_threads_that_work_at_once_share_the_time() -> None:
    """An agent starts workers in one thread while another one writes."""
    spans = [
        PlacedSpan("start workers", 0.0, 10.0, "", {}),
        PlacedSpan("import", 2.0, 4.0, "", {}),
        PlacedSpan("append", 5.0, 9.0, "journal", {}),
    ]
    times: dict[str, float] = {}
    for name, ms in _own_times(spans, 1.0, 12.0):
        times[name] = times.get(name, 0.0) + ms
    assert times == {"start workers": 1.0, "import": 3.0, "append": 7.0}
    assert sum(times.values()) == 11.0
