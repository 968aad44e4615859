"""The spans of all processes in a recovery, on one clock, and those that the recovery waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from swift_ft.checkpoint.recording_file import StoredRecording, recording_names
from swift_ft.checkpoint.worker_files import WorkerFiles
from swift_ft.observe.spans import FIRST_ITERATION, Span
from swift_ft.offline.clock_alignment import Clock, align
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.recoveries import Course
from swift_ft.storage.read_only import read_all
from swift_ft.storage.store import Store

_MS = 1e6


@dataclass(frozen=True, slots=True)
class PlacedSpan:
    """A span on the recovery's clock. Times are milliseconds since the journal was given the loss.

    Attributes:
        name: of the span (docs/timeline.md).
        began_ms: when it began.
        ms: how long it took.
        thread: of the process; empty for the main one.
        facts: about it.
    """

    name: str
    began_ms: float
    ms: float
    thread: str
    facts: Mapping[str, Any]

    @property
    def ended_ms(self) -> float:
        """When it ended."""
        return self.began_ms + self.ms


@dataclass(frozen=True, slots=True)
class ProcessTrace:
    """The spans of one process.

    Attributes:
        by: the process, in words.
        rank: of a worker; None for an agent.
        machine: its machine.
        slot: of the machine; None for a spare.
        began_ms: when it learned of the loss, or was started.
        ended_ms: the end of its first iteration; of an agent, when it knew that all are live.
        uncertainty_ms: by how much all its times may be wrong, at most; None if that is not known.
        spans: in order of their beginning; a span comes before those within it.
        left_out: details that were not kept.
    """

    by: str
    rank: int | None
    machine: str
    slot: int | None
    began_ms: float
    ended_ms: float
    uncertainty_ms: float | None
    spans: tuple[PlacedSpan, ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class PathSegment:
    """A part of the recovery that ends when the last one has done something.

    Attributes:
        name: what all waited for.
        by: the last one, in words.
        began_ms: when the segment before ended.
        ms: how long it took.
        spans: what the last one did meanwhile, or its machine's agent before it was started: milliseconds by
            the name of the span, without what is within it. Waits for others are in there, too.
    """

    name: str
    by: str
    began_ms: float
    ms: float
    spans: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TracedRecovery:
    """One recovery.

    Attributes:
        generation: that went live.
        zero: when the journal was given the loss, in Unix seconds by the clock of the host that reported it.
        participants: workers by rank, then agents.
        missing: workers that trained afterwards, and of which no recording is there.
        path: what the recovery waited for, from the loss to the last first iteration.
    """

    generation: int
    zero: float
    participants: tuple[ProcessTrace, ...]
    missing: tuple[int, ...]
    path: tuple[PathSegment, ...]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


def read_recordings(
    store: Store,
    run_id: str,
    generations: Collection[int],
    on_file: Callable[[int], None] = lambda count: None,
) -> tuple[list[StoredRecording], list[str]]:
    """The recordings of a run's processes, and the damaged ones among their files, one line each.

    Args:
        run_id: the run.
        generations: that went live after recoveries.
        on_file: called with the number of files that were read since the last call, by any thread.
    """
    files = WorkerFiles(store, run_id)
    names = recording_names(files, generations) if generations else []
    return read_all(lambda name: files.read(StoredRecording, name), names, on_file)


def trace_recoveries(
    courses: Iterable[Course], recordings: Iterable[StoredRecording]
) -> dict[int, TracedRecovery]:
    """All recoveries that ended, by the generation that went live."""
    of_generation: dict[int, list[StoredRecording]] = defaultdict(list)
    for stored in recordings:
        of_generation[stored.generation].append(stored)
    return {
        course.recovery.generation: _traced(course, of_generation[course.recovery.generation])
        for course in courses
        if course.live is not None
    }


# ---------------------------------------------------------------------------------------- on one clock


class _Placed:
    """Times of all processes, as milliseconds since the loss."""

    def __init__(self, course: Course, recordings: Sequence[StoredRecording]) -> None:
        by_clock = defaultdict(list)
        for stored in recordings:
            by_clock[stored.clock].append(stored.recording)
        self._recordings = recordings
        reporters = [one.clock for one in recordings if _appended(one, course.loss.position) is not None]
        reference = (reporters or sorted(by_clock, key=lambda clock: (-len(by_clock[clock]), clock)) or [""])[
            0
        ]
        self._clocks: dict[str, Clock] = align(by_clock, reference) if by_clock else {}
        home = by_clock[reference][0] if by_clock else None
        self._to_unix = home.unix - home.began if home is not None else 0
        self._zero = self._time_of(course.loss)
        self.zero_unix = (self._zero + self._to_unix) / 1e9

    def _time_of(self, entry: Entry) -> int:
        """When an entry was appended, by the reference: as its author says, else by its Unix time."""
        for stored in self._recordings:
            if stored.by == entry.by and (at := _appended(stored, entry.position)) is not None:
                return at + self._clocks[stored.clock].shift
        return round(entry.at * 1e9) - self._to_unix

    def entry_ms(self, entry: Entry) -> float:
        return round((self._time_of(entry) - self._zero) / _MS, 6)

    def ms(self, stored: StoredRecording, at: int) -> float:
        return round((at + self._clocks[stored.clock].shift - self._zero) / _MS, 6)

    def participant(self, stored: StoredRecording) -> ProcessTrace:
        recording, uncertainty = stored.recording, self._clocks[stored.clock].uncertainty

        def placed(span: Span) -> PlacedSpan:
            took = round((span.ended - span.began) / _MS, 6)
            return PlacedSpan(span.name, self.ms(stored, span.began), took, span.thread, span.facts)

        return ProcessTrace(
            by=stored.by,
            rank=stored.rank,
            machine=stored.machine,
            slot=stored.slot,
            began_ms=self.ms(stored, recording.began),
            ended_ms=self.ms(stored, recording.ended),
            uncertainty_ms=None if uncertainty is None else uncertainty / _MS,
            spans=tuple(map(placed, sorted(recording.spans, key=lambda span: (span.began, -span.ended)))),
            left_out=recording.left_out,
        )


def _appended(stored: StoredRecording, position: int) -> int | None:
    return next((at for own, at in stored.recording.own if own == position), None)


def _traced(course: Course, recordings: Sequence[StoredRecording]) -> TracedRecovery:
    places = _Placed(course, recordings)
    order = sorted(recordings, key=lambda one: (one.rank is None, one.rank or 0, one.slot or 0, one.by))
    participants = tuple(places.participant(stored) for stored in order)
    known = {one.rank for one in participants}
    return TracedRecovery(
        course.recovery.generation,
        places.zero_unix,
        participants,
        tuple(rank for rank in range(course.workers) if rank not in known),
        tuple(_path(course, places, participants)),
    )


# ------------------------------------------------------------------------------------- what it waited for


def _path(course: Course, places: _Placed, participants: Sequence[ProcessTrace]) -> Iterator[PathSegment]:
    began = min((one.began_ms for one in participants), default=0.0)
    before = min(began, 0.0 if course.fault is None else places.entry_ms(course.fault))
    for name, by, until in _milestones(course, places, participants):
        if until <= before and name != "detect":  # two of them are one, or clocks are not that exact
            continue
        yield PathSegment(name, by, before, until - before, _shares(by, participants, before, until))
        before = until


def _milestones(
    course: Course, places: _Placed, participants: Sequence[ProcessTrace]
) -> Iterator[tuple[str, str, float]]:
    """The end of each part, in order: the part's name, the process that was last, and the time in ms."""
    entries = (
        ("detect", course.loss),
        ("wait for a machine", course.joined),
        ("report", course.reported),
        ("rebuild", course.live),
    )
    for name, entry in entries:
        if entry is not None and (name == "detect" or entry is not course.loss):
            yield name, entry.by, places.entry_ms(entry)
    live = 0.0 if course.live is None else places.entry_ms(course.live)
    for name, of in (
        ("gather", "connect"),  # it ends when the last one begins to connect
        ("connect", "connect"),
        ("go live", "go live"),
        ("first iteration", FIRST_ITERATION),
    ):
        ends = [
            (span.began_ms if name == "gather" else span.ended_ms, one.by)
            for one in participants
            for span in one.spans
            if span.name == of and span.began_ms >= live
        ]
        if ends:
            until, by = max(ends)
            yield name, by, until


def _shares(by: str, participants: Sequence[ProcessTrace], began: float, ended: float) -> dict[str, float]:
    """The milliseconds of each span of a process in a time, by name, without the spans within it.

    Before a worker was started, its machine's agent did something for it.
    """
    shares: dict[str, float] = defaultdict(float)
    for last in (one for one in participants if one.by == by):
        for one in participants:
            is_agent = one.rank is None and one.machine == last.machine and one is not last
            if one is last or is_agent:
                until = min(ended, last.began_ms) if is_agent else ended
                spans = [span for span in one.spans if one.rank is None or not span.thread]
                for name, ms in _own_times(spans, began, until):
                    shares[name] += ms
    return {name: round(ms, 3) for name, ms in shares.items() if ms >= 0.001}


def _own_times(spans: Sequence[PlacedSpan], began: float, ended: float) -> Iterator[tuple[str, float]]:
    """Names of spans with times, which add up to no more than the time between these two.

    A moment belongs to the span that began last of those that are open. It is the innermost one of its
    thread; the threads of an agent work at once.
    """
    within = [span for span in spans if span.began_ms < ended and span.ended_ms > began]
    bounds = {time for span in within for time in (span.began_ms, span.ended_ms) if began < time < ended}
    for first, then in pairwise(sorted({began, ended, *bounds})):
        working = [span for span in within if span.began_ms <= first and span.ended_ms >= then]
        if working:
            yield max(working, key=lambda span: (span.began_ms, -span.ended_ms)).name, then - first
