"""A run over time in words, for tables, pages and pictures alike. Nothing here is escaped."""

from __future__ import annotations

from collections.abc import Sequence

from swift_ft.cli.words import cost_in_words, numbers_in_words
from swift_ft.offline.recovery_spans import PathSegment
from swift_ft.offline.timeline import RecoveryReport, RunTimeline
from swift_ft.recovery.occupancy import Doing, Tenure
from swift_ft.units import format_moment, format_seconds, named

_SHARD = ", shard "
_LONGEST = 4
_WORTH_MS = 1.0
"""A line names so many spans of a part of a recovery at most, and none that is shorter."""


def outcome(timeline: RunTimeline) -> str:
    """The end of the run, and its time, in one sentence."""
    if timeline.began is None or timeline.until is None:
        return "Nothing is known of what happened in this run."
    began, until = format_moment(timeline.began), format_moment(timeline.ended or timeline.until)
    if timeline.ok is None:
        return f"Began {began}. No end is known: {timeline.phase} at the last sign of life, {until}."
    return f"Began {began}, ended {'well' if timeline.ok else 'with an error'} {until}: {timeline.reason}."


def goodput_in_words(timeline: RunTimeline) -> str:
    """``97.3 %``, ``at most 97.3 %`` or ``unknown``."""
    good = timeline.goodput
    if good.share is None:
        return "unknown"
    return f"{'at most ' if good.at_most else ''}{100 * good.share:.1f} %"


def in_seconds(seconds: float | None, estimated: bool = False) -> str:
    """A duration that may be unknown, or an estimate."""
    if seconds is None:
        return "unknown"
    return f"{'about ' if estimated else ''}{format_seconds(seconds)}"


def lost_in_words(report: RecoveryReport) -> str:
    """The lost iterations, and those that were replayed."""
    recovery = report.recovery
    said = [cost_in_words(recovery)]
    for rank, count in sorted(recovery.replayed_iterations.items()):
        if count:
            said.append(f"worker {rank} replayed {count}")
    if recovery.helpers:
        said.append(f"{named('worker', recovery.helpers)} helped")
    if recovery.restored:
        said.append(f"replicas restored {numbers_in_words(recovery.restored)}")
    return ", ".join(said)


def path_in_words(path: Sequence[PathSegment]) -> str:
    """The waits of a recovery, in one line: each part, who was last, and what that one did meanwhile."""
    said = []
    for part in path:
        longest = sorted(part.spans.items(), key=lambda item: -item[1])[:_LONGEST]
        spans = ", ".join(f"{name} {ms:.1f}" for name, ms in longest if ms >= _WORTH_MS)
        said.append(f"{part.name} {part.ms:.1f} ms ({part.by}{f': {spans}' if spans else ''})")
    return " > ".join(said)


def place_in_words(timeline: RunTimeline, place: Tenure) -> str:
    """All that a machine held in a slot: stages, or the parts of the model, and as how many replicas."""
    if place.slot is None:
        return "nothing: it waited"
    workers = timeline.workers_per_machine
    ranks = range(place.slot * workers, (place.slot + 1) * workers)
    spans = [
        span
        for span in timeline.occupancy.workers
        if span.rank in ranks and span.machine == place.machine and span.until > place.since
    ]
    stages = sorted({stage for span in spans for stage in span.stages})
    held = {span.holds for span in spans if span.holds}
    others = {
        span.rank for span in timeline.occupancy.workers if span.holds in held and span.rank not in ranks
    }
    said = []
    parts = sorted({part for parts in held for part in parts})
    if any(_SHARD in part for part in parts):
        said += [_shard_in_words(part) for part in parts]
    elif stages:
        said.append(named("stage", stages))
    elif parts:
        said.append(", ".join(parts))
    elif spans and timeline.sharded:
        said.append("shards of the model that no other machine had")
    if others:
        said.append(f"replica of {named('worker', others)}")
    for doing, words in ((Doing.REPLAYS, "replayed"), (Doing.HELPS, "helped")):
        if took := sum(span.until - span.since for span in spans if span.doing == doing):
            said.append(f"{words} for {format_seconds(took)}")
    return ", ".join(said) or "unknown"


def _shard_in_words(part: str) -> str:
    """``shard 1 of 2 of the model``, from ``the model, shard 1 of 2``; any other part as it is."""
    whole, shard, place = part.partition(_SHARD)
    return f"{shard.removeprefix(', ')}{place} of {whole}" if shard else part
