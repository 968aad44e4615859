"""Goodput of a run, and its lost time by cause. Pure. docs/timeline.md defines all of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from swift_ft.checkpoint.worker_history import GenerationWork
from swift_ft.recovery.job_state import Phase
from swift_ft.recovery.occupancy import Occupancy, PhaseSpan
from swift_ft.recovery.recoveries import Recovery
from swift_ft.recovery.world_changes import WorldChange

Works = Mapping[int, Sequence[tuple[int, GenerationWork]]]
"""By generation, the rank and the work of each worker that noted any."""


class Cause(StrEnum):
    """Why time was not training that counts.

    Attributes:
        meaning: when it is, in words.
        told: its name for a reader who knows trainings, and not the protocol.
    """

    meaning: str
    told: str

    STARTING = "starting", "until all workers had begun their first iteration"
    NO_MACHINE = "waiting for a machine", "a lost machine had no replacement yet"
    AGREEING = "agreeing", "processes start, and all workers say where they stand", "starting replacements"
    REBUILDING = (
        "rebuilding",
        "lost state is loaded and replayed; the others wait or help",
        "rebuilding lost state",
    )
    REGROUPING = (
        "regrouping",
        "process groups are formed, and replicas copy state",
        "connecting workers again",
    )
    SWITCHING = (
        "handing over to another world",
        "all have stopped for another world, and that takes their state",
    )
    INTERRUPTED = (
        "interrupted iterations",
        "from the beginning of an iteration to the detection of the loss that ended it",
    )
    AGAIN = "iterations computed again", "completed iterations that a recovery took back"
    HELD_BACK = (
        "held back by the log",
        "training waits for room in the log's budget",
        "waiting for room for the log",
    )
    SAVING = "saving checkpoints", "state is copied for checkpoints, and digests are taken"
    ENDING = "ending", "after the last iteration: the last checkpoint, and tidying up"

    def __new__(cls, value: str, meaning: str, told: str = "") -> Self:
        """A member is equal to its value, as in JSON."""
        member = str.__new__(cls, value)
        member._value_, member.meaning, member.told = value, meaning, told or value
        return member


CAUSE_OF_PHASE = {
    Phase.FORMING: Cause.NO_MACHINE,
    Phase.AGREEING: Cause.AGREEING,
    Phase.RECOVERING: Cause.REBUILDING,
}


@dataclass(frozen=True, slots=True)
class LostTime:
    """Time that one cause took.

    Attributes:
        seconds: None if nothing in the store tells.
        estimated: from the mean duration of an iteration.
    """

    cause: Cause
    seconds: float | None
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class Goodput:
    """Goodput: the share of a run that was training that counts.

    Attributes:
        wall_s: the known duration of the run.
        training_s: the rest of it once all known losses are subtracted.
        share: of training in the duration; None if the duration is unknown.
        at_most: some loss is unknown, so that the true share may be lower.
        lost: one for each cause, in the order of :class:`Cause`.
    """

    wall_s: float
    training_s: float
    share: float | None
    at_most: bool
    lost: tuple[LostTime, ...]


@dataclass(slots=True)
class _Sums:
    seconds: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))
    unknown: set[Cause] = field(default_factory=set)


def account(
    occupied: Occupancy, recoveries: Sequence[Recovery], works: Works, worlds: Sequence[WorldChange] = ()
) -> Goodput:
    """Divide the duration of a run.

    Args:
        occupied: the run's phases.
        recoveries: all of them.
        works: what workers noted.
        worlds: all changes to other worlds.
    """
    sums, phases = _Sums(), occupied.phases
    interrupted = {recovery.detected for recovery in recoveries}
    first_live = next((i for i, span in enumerate(phases) if span.phase == Phase.LIVE), len(phases))
    for number, span in enumerate(phases):
        duration = span.until - span.since
        if span.phase == Phase.LIVE:
            group, is_first = works.get(span.generation, ()), number == first_live
            _account_live(sums, span, occupied.training_over, group, interrupted, is_first)
        else:
            cause = Cause.STARTING if number < first_live else CAUSE_OF_PHASE[span.phase]
            sums.seconds[cause] += duration
    for change in worlds:  # while the journal says that all train
        until = change.switched if change.switched is not None else change.ended
        if change.stopped is not None and until is not None:
            sums.seconds[Cause.SWITCHING] += until - change.stopped
    _account_again(sums, recoveries, works)
    wall = phases[-1].until - phases[0].since if phases else 0.0
    training = max(0.0, wall - sum(sums.seconds.values()))
    lost = tuple(_lost(sums, cause) for cause in Cause)
    return Goodput(wall, training, training / wall if wall else None, bool(sums.unknown), lost)


def _account_live(
    sums: _Sums,
    span: PhaseSpan,
    training_over: float | None,
    works: Sequence[tuple[int, GenerationWork]],
    interrupted: set[float],
    is_first: bool,
) -> None:
    over = training_over if training_over is not None and span.since <= training_over else span.until
    over = min(over, span.until)
    sums.seconds[Cause.ENDING] += span.until - over
    if not works:
        sums.unknown |= {Cause.REGROUPING, Cause.HELD_BACK, Cause.SAVING}
        sums.unknown |= {Cause.INTERRUPTED} if span.until in interrupted else set()
        return
    first = regrouped(span.since, over, works)
    sums.seconds[Cause.STARTING if is_first else Cause.REGROUPING] += first - span.since
    begins = [work.interrupted for _, work in works if work.interrupted is not None]
    begin = max(first, min(begins)) if begins else over
    sums.seconds[Cause.INTERRUPTED] += max(0.0, over - begin)
    left = max(0.0, min(begin, over) - first)
    for cause, longest in (
        (Cause.HELD_BACK, max(work.held_back_s for _, work in works)),
        (Cause.SAVING, max(work.saving_s for _, work in works)),
    ):
        sums.seconds[cause] += min(left, longest)
        left -= min(left, longest)


def regrouped(live: float, until: float, works: Sequence[tuple[int, GenerationWork]]) -> float:
    """When the last worker that noted it began its first step of a generation, not after ``until``."""
    begins = [work.began for _, work in works if work.began is not None]
    return min(until, max([live, *begins]))


def _account_again(sums: _Sums, recoveries: Sequence[Recovery], works: Works) -> None:
    for recovery in recoveries:
        if not (count := recovery.most_lost):
            continue
        duration = next(_iteration_s(works, recovery.generation), None)
        if duration is None:
            sums.unknown.add(Cause.AGAIN)
        else:
            sums.seconds[Cause.AGAIN] += count * duration


def _iteration_s(works: Works, before: int) -> Iterator[float]:
    """Mean durations of an iteration in earlier generations, the latest first."""
    for generation in sorted((g for g in works if g < before), reverse=True):
        for _, work in sorted(works[generation], key=lambda pair: -pair[1].steps):
            if work.steps and work.began is not None and work.until is not None:
                busy = work.until - work.began - work.held_back_s - work.saving_s
                yield max(0.0, busy) / work.steps


def _lost(sums: _Sums, cause: Cause) -> LostTime:
    known = sums.seconds[cause]
    if cause in sums.unknown and not known:
        return LostTime(cause, None)
    return LostTime(cause, known, estimated=cause == Cause.AGAIN and known > 0)
