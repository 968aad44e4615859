"""The tables of a run over time, for a terminal and for a page alike. Nothing here is escaped."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from swift_ft.cli.timeline.chart import in_words
from swift_ft.cli.timeline.words import in_seconds, lost_in_words, place_in_words
from swift_ft.offline.lost_time import Goodput
from swift_ft.offline.timeline import RecoveryReport, RunTimeline
from swift_ft.units import counted, format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table.

    Attributes:
        title: for a terminal; a page has headings.
        columns: their names.
        rows: a cell for each column.
        numbers: the names of columns that hold numbers, and are aligned on their right.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[str]

    def without(self, column: str) -> ReportTable:
        """The table without one of its columns."""
        at = self.columns.index(column)
        rows = [(*row[:at], *row[at + 1 :]) for row in self.rows]
        return replace(self, columns=(*self.columns[:at], *self.columns[at + 1 :]), rows=rows)


def time_table(timeline: RunTimeline) -> ReportTable:
    """The duration of the run in parts: training first, then lost time by cause."""
    good = timeline.goodput
    rows = [
        ("training that counts", in_seconds(good.training_s), _percent(good, good.training_s), "the rest")
    ]
    for lost in good.lost:
        time = in_seconds(lost.seconds, lost.estimated)
        rows.append((lost.cause.value, time, _percent(good, lost.seconds), lost.cause.meaning))
    return ReportTable("where the time went", ("", "time", "share", "what that is"), rows, ("time", "share"))


def _percent(good: Goodput, seconds: float | None) -> str:
    return "" if seconds is None else f"{100 * seconds / (good.wall_s or 1.0):.1f} %"


def recovery_table(timeline: RunTimeline) -> ReportTable:
    """One row for each recovery."""
    rows = [
        (
            str(report.number),
            in_words(report),
            str(report.recovery.resume) if report.recovery.mode else "",
            took_in_words(report),
            causes_in_words(report, "\n"),
            lost_in_words(report),
        )
        for report in timeline.recoveries
    ]
    columns = ("", "what", "from iteration", "took", "of which", "cost")
    return ReportTable("recoveries", columns, rows, ("", "from iteration", "took"))


def world_table(timeline: RunTimeline) -> ReportTable:
    """One row for each change to another world."""
    began = timeline.began or 0.0
    rows = [
        (
            str(change.world),
            counted(len(change.machines), "machine"),
            format_seconds(change.planned - began),
            "" if change.prepared is None else format_seconds(change.prepared - change.planned),
            "" if change.iteration is None else str(change.iteration),
            "" if change.pause_s is None else format_seconds(change.pause_s),
            f"given up: {change.given_up}" if change.ended is not None else change.reason,
        )
        for change in timeline.worlds
    ]
    columns = ("world", "on", "planned at", "prepared in", "from iteration", "pause", "why")
    numbers = ("world", "planned at", "prepared in", "from iteration", "pause")
    return ReportTable("other worlds", columns, rows, numbers)


def took_in_words(report: RecoveryReport) -> str:
    """``4.50 s``, or ``4.50 s, not ended``."""
    return format_seconds(report.total_s) + ", not ended" * (report.recovery.live is None)


def causes_in_words(report: RecoveryReport, separator: str) -> str:
    """The time of a recovery in parts, by cause."""
    return separator.join(f"{cause.value} {format_seconds(s)}" for cause, s in report.seconds.items())


def place_table(timeline: RunTimeline) -> ReportTable:
    """Machines and what they held: slots first, then spares, each in the order of time."""
    began = timeline.began or 0.0
    rows = [
        (
            "spare" if place.slot is None else f"machine {place.slot}",
            place.machine,
            format_seconds(place.since - began),
            format_seconds(place.until - began),
            place.end,
            place_in_words(timeline, place),
        )
        for place in sorted(
            timeline.occupancy.tenures,
            key=lambda place: (place.slot is None, place.slot or 0, place.since),
        )
    ]
    return ReportTable("who held what", ("place", "name", "from", "to", "then", "held"), rows, ("from", "to"))


def work_table(timeline: RunTimeline) -> ReportTable:
    """Work and log of each worker, as far as it noted them."""
    columns = (
        "worker",
        "steps",
        "replayed",
        "messages logged",
        "payload",
        "held back",
        "saving",
        "noted up to",
    )
    rows: list[Sequence[str]] = []
    for worker in timeline.totals:
        if not worker.known:
            rows.append((str(worker.rank), *["unknown"] * (len(columns) - 1)))
            continue
        rows.append(
            (
                str(worker.rank),
                f"{'at least ' * worker.at_least}{worker.steps}",
                f"{worker.replayed} in {format_seconds(worker.replay_s)}" if worker.replayed else "0",
                str(worker.log_messages),
                format_bytes(worker.log_bytes),
                format_seconds(worker.held_back_s),
                format_seconds(worker.saving_s),
                str(worker.iteration),
            )
        )
    return ReportTable("work and log", columns, rows, columns)
