"""The content of a Gantt chart of a run, independent of how it is drawn. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from swift_ft.cli.news import news
from swift_ft.offline.timeline import RecoveryReport, RunTimeline
from swift_ft.recovery.occupancy import Doing, WorkerSpan
from swift_ft.units import format_seconds, named

_MOST_ROWS = 48
_MARGIN = 0.15
"""Of a recovery's duration, shown before and after it."""
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_STEADY = (Doing.TRAINS, Doing.WAITS, Doing.JOINS, Doing.DONE)


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. Times are seconds on the chart's axis.

    Attributes:
        doing: its colour.
        begin: its left end.
        end: its right end.
        title: what it says when the mouse is on it.
    """

    doing: Doing
    begin: float
    end: float
    title: str


@dataclass(frozen=True, slots=True)
class Lane:
    """One worker or one spare."""

    label: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment, drawn across all rows.

    Attributes:
        kind: ``loss``, ``back``, ``checkpoint`` or ``memory``.
        at: seconds on the axis.
        label: short; may be empty.
        title: what it says when the mouse is on it.
    """

    kind: str
    at: float
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture.

    Attributes:
        title: for those who cannot see it.
        axis: what the horizontal axis shows.
        begin: its left end, in seconds.
        end: its right end.
        rows: from top to bottom.
        marks: moments.
        left_out: rows that are not shown: they only train and wait.
    """

    title: str
    axis: str
    begin: float
    end: float
    rows: tuple[Lane, ...]
    marks: tuple[Moment, ...]
    left_out: int

    @property
    def shown(self) -> list[Doing]:
        """All that occurs in it, in the legend's order."""
        found = {bar.doing for row in self.rows for bar in row.bars}
        return [doing for doing in Doing if doing in found]


def run_chart(timeline: RunTimeline, say: Callable[[RecoveryReport], str] | None = None) -> Chart | None:
    """The whole run; None if nothing of it is known.

    Args:
        say: tells a recovery; by default as :func:`in_words` does.
    """
    say = say or in_words
    if timeline.began is None or timeline.until is None or timeline.until <= timeline.began:
        return None
    marks = [
        Moment(
            "loss",
            report.recovery.detected - timeline.began,
            str(report.number),
            f"recovery {report.number}: {say(report)}",
        )
        for report in timeline.recoveries
    ]
    for one in timeline.checkpoints:
        committed = news("checkpoint_committed", iteration=one.iteration)
        marks.append(Moment("checkpoint", one.at - timeline.began, "", committed.text))
    for copy in timeline.memory_checkpoints:
        found = f"the memory checkpoint of iteration {copy.iteration} is on the machines that are left"
        marks.append(
            Moment("memory", copy.at - timeline.began, "", f"{found}{', and all go back to it' * copy.used}")
        )
    title = f"What each worker of run {timeline.run_id} did from its beginning to its end"
    rows, left_out = _rows(timeline, timeline.began, timeline.began, timeline.until)
    duration = timeline.until - timeline.began
    return Chart(title, "time since the run began", 0.0, duration, rows, tuple(marks), left_out)


def recovery_chart(
    timeline: RunTimeline, report: RecoveryReport, say: Callable[[RecoveryReport], str] | None = None
) -> Chart:
    """One recovery, with a little of the training before and after it. ``say``: as for the whole run."""
    recovery, began, until = report.recovery, timeline.began, timeline.until
    assert began is not None
    assert until is not None
    margin = max(_MARGIN * report.total_s, 0.01)
    end = report.back or recovery.live
    begin, last = max(began, recovery.detected - margin), min(until, (end or until) + margin)
    marks = [Moment("loss", 0.0, "detected", "; ".join(recovery.reasons) or "the loss was detected")]
    if end is not None:
        marks.append(
            Moment("back", end - recovery.detected, "all train", f"after {format_seconds(report.total_s)}")
        )
    rows, left_out = _rows(timeline, recovery.detected, begin, last)
    title = f"What each worker did in recovery {report.number}: {(say or in_words)(report)}"
    axis = "time since the loss was detected"
    return Chart(
        title, axis, begin - recovery.detected, last - recovery.detected, rows, tuple(marks), left_out
    )


def in_words(report: RecoveryReport) -> str:
    """Lost machines, and the way back."""
    return f"{lost_or_interrupted(report)}, {report.recovery.mode or 'no way back chosen'}"


def lost_or_interrupted(report: RecoveryReport) -> str:
    """Lost machines; without any, connections broke."""
    slots = set(report.recovery.slots)
    return f"{named('machine', slots)} lost" if slots else "interrupted"


def ticks(begin: float, end: float, most: int = 8) -> list[tuple[float, str]]:
    """Round places on an axis, with their labels."""
    raw = (end - begin) / most
    if raw <= 0:
        return [(begin, "0 s")]
    power = 10.0 ** math.floor(math.log10(raw))
    step: float = next((s for s in _STEPS_S if s >= raw), 86400 * math.ceil(raw / 86400))
    if raw <= 0.5:
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.9999)
    first = math.ceil(begin / step - 1e-9)
    return [(n * step, _tick(n * step, step)) for n in range(first, math.floor(end / step + 1e-9) + 1)]


def _tick(at: float, step: float) -> str:
    if step < 1:
        return f"{at:.{max(0, -math.floor(math.log10(step) + 1e-9))}f} s"
    if step < 60:
        return f"{at:.0f} s" if abs(at) < 120 else f"{at // 60:.0f}:{at % 60:02.0f} min"
    if step < 3600:
        return f"{at / 60:.0f} min" if abs(at) < 7200 else f"{at // 3600:.0f}:{at % 3600 / 60:02.0f} h"
    return f"{at / 3600:.0f} h" if step < 86400 else f"{at / 86400:.0f} d"


def _rows(timeline: RunTimeline, zero: float, begin: float, end: float) -> tuple[tuple[Lane, ...], int]:
    by_rank: dict[int, list[WorkerSpan]] = {}
    for span in timeline.occupancy.workers:
        if span.until > begin and span.since < end:
            by_rank.setdefault(span.rank, []).append(span)
    ranks = _chosen(by_rank)
    rows = [
        Lane(_label(timeline, by_rank[rank]), tuple(_bars(by_rank[rank], zero, begin, end))) for rank in ranks
    ]
    rows += [
        Lane(f"spare {place.machine}", (_spare_bar(place.machine, a - zero, b - zero),))
        for place in timeline.occupancy.tenures
        if place.slot is None
        and (a := max(place.since, begin)) < (b := min(place.until, end))
        and b - a > 0.002 * (end - begin)
    ][: max(0, _MOST_ROWS - len(rows))]
    return tuple(rows), len(by_rank) - len(ranks)


def _chosen(by_rank: dict[int, list[WorkerSpan]]) -> Sequence[int]:
    """All workers of a small job; of a large one, those first that did something unusual."""
    if len(by_rank) <= _MOST_ROWS:
        return sorted(by_rank)

    def calm(rank: int) -> bool:
        return all(span.doing in _STEADY for span in by_rank[rank])

    return sorted(sorted(by_rank, key=lambda rank: (calm(rank), rank))[:_MOST_ROWS])


def _bars(spans: list[WorkerSpan], zero: float, begin: float, end: float) -> Iterator[Bar]:
    for span in spans:
        duration = format_seconds(span.until - span.since)
        where = f"{span.machine}, generation {span.generation}" if span.machine else "empty slot"
        title = f"worker {span.rank} {span.doing.meaning}: {duration} ({where})"
        yield Bar(span.doing, max(span.since, begin) - zero, min(span.until, end) - zero, title)


def _spare_bar(machine: str, begin: float, end: float) -> Bar:
    return Bar(Doing.WAITS, begin, end, f"{machine} waits as a spare: {format_seconds(end - begin)}")


def _label(timeline: RunTimeline, spans: list[WorkerSpan]) -> str:
    rank, stages = spans[0].rank, next((span.stages for span in reversed(spans) if span.stages), ())
    shown = f" · {named('stage', stages)}" if stages else ""
    return f"{'machine' if timeline.workers_per_machine == 1 else 'worker'} {rank}{shown}"
