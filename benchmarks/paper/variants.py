"""What figures 9 to 11 compare: a list of variants, each a method to survive the loss of a machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib.results import TRAIN_WITH
from examples.commands import CommandError
from examples.disturbed import Failure, SwiftOutcome, plain, swift

_WARM_UP = 5  # iterations that are not timed
_ONWARD = 4  # iterations after the interrupted one


@dataclass(frozen=True)
class Began:
    """A worker began an iteration, at a Unix time.

    Attributes:
        rank: the worker.
        iteration: which one; one more than the last when the worker had finished.
        mode: ``live``, ``replay`` or ``finished``.
        at: when.
    """

    rank: int
    iteration: int
    mode: str
    at: float


@dataclass(frozen=True)
class Span:
    """One iteration of the whole job, or of those that replay: seconds after the kill."""

    iteration: int
    begin: float
    end: float


@dataclass(frozen=True)
class Run:
    """One failure, survived.

    Attributes:
        mode: how the job recovered, as in the recovery's report.
        spans: all iterations, repeated and replayed ones too.
        iteration_s: median of those before the failure.
        joined_s: from the kill until the replacement joined: the paper's initialization time.
        recovery_s: from then until all were in the interrupted iteration again: its recovery time.
        again: iterations that were computed twice.
        logged_bytes: per iteration, all workers, from the sessions' counters.
        logging_bubble_s: per iteration, added up over the workers that log.
        plan: the session's plan before the failure.
    """

    mode: str
    spans: tuple[Span, ...]
    iteration_s: float
    joined_s: float
    recovery_s: float
    again: int
    logged_bytes: int = 0
    logging_bubble_s: float = 0.0
    plan: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """One method to survive a failure.

    Attributes:
        name: in figures and tables.
        build: trains with the failure, in a folder, and returns how that went.
        groups: how many there are; None where there is no log.
        published: its name among the paper's numbers.
    """

    name: str
    build: Callable[[Failure, Path], Run]
    groups: int | None = None
    published: str = ""


def with_torchrun(failure: Failure, folder: Path) -> Run:
    """Global checkpoints with DCP; torchrun restarts all workers."""
    outcome = plain(failure, folder)
    steps = outcome.timeline()
    before = [at - outcome.killed for at in outcome.before]
    after = [at - outcome.killed for at in (outcome.loaded, *outcome.after)]
    spans = (*_spans(before, 1), *_spans(after, failure.kill_iteration - outcome.iterations_lost))
    return Run(
        mode="restart",
        spans=spans,
        iteration_s=_failure_free_s(spans),
        joined_s=steps["joined"],
        recovery_s=steps["back"] - steps["joined"],
        again=outcome.iterations_lost,
    )


def with_session(failure: Failure, folder: Path, session: Mapping[str, Any]) -> Run:
    """swift-run, with these arguments of the session."""
    env = {"SESSION": json.dumps(dict(session)), "NOTES": str(folder / "notes")}
    failure = replace(failure, script=TRAIN_WITH)
    outcome = swift(failure, failure.kill_iteration + _ONWARD, folder, env=env)
    if [r["live"] is not None for r in outcome.recoveries] != [True] or outcome.killed is None:
        raise CommandError(f"expected one recovery that ends, got {outcome.recoveries}")
    recovery, killed = outcome.recoveries[0], outcome.killed
    spans = tuple(_all_spans(outcome, failure, _noted(folder / "notes")))
    back = (span.begin for span in spans if span.begin >= 0 and span.iteration == failure.kill_iteration)
    notes = [json.loads(path.read_text()) for path in sorted((folder / "notes").glob("rank*.json"))]
    if len(notes) != failure.machines:
        raise CommandError(f"only {len(notes)} workers left notes in {folder}")
    return Run(
        mode=recovery["mode"],
        spans=spans,
        iteration_s=_failure_free_s(spans),
        joined_s=recovery["joined"] - killed,
        recovery_s=next(back) + killed - recovery["joined"],
        again=sum(span.begin >= 0 and span.iteration < failure.kill_iteration for span in spans),
        logged_bytes=sum(note["log"]["bytes"] for note in notes),
        logging_bubble_s=sum(note["log"]["bubble_s"] for note in notes if note["log"]["bytes"]),
        plan=next(note["plan"] for note in notes if note["plan"]),
    )


def _logging(*groups: Sequence[int]) -> Callable[[Failure, Path], Run]:
    return partial(with_session, session={"groups": groups})


CHECKPOINT = Variant("global checkpoint", with_torchrun)
"""What the others are compared with."""

PIPELINES = (
    CHECKPOINT,
    Variant("logging, 4 groups", _logging([0], [1], [2], [3]), 4, "logging, a group per machine"),
    Variant("logging, 3 groups", _logging([0], [1, 2], [3]), 3),
    Variant("logging, 2 groups", _logging([0, 1], [2, 3]), 2),
    Variant("1 group: no log", _logging([0, 1, 2, 3]), 1),
)
"""All of a pipeline on four machines. Further arguments of a session make a further entry:

``Variant("logging, ...", partial(with_session, session={...}), 4, "logging, parallel recovery")``
"""

# ------------------------------------------------------------------------------------- iterations, as seen


def _failure_free_s(spans: Iterable[Span]) -> float:
    whole = [span.end - span.begin for span in spans if span.end < 0 and span.iteration >= _WARM_UP]
    if not whole:
        raise CommandError(f"no iteration after the first {_WARM_UP} was seen before the failure")
    return median(whole)


def _spans(ends: Sequence[float], first: int) -> Iterator[Span]:
    """Iterations from ``first`` on, which begin where the one before them ended."""
    for iteration, (begin, end) in enumerate(pairwise(ends), start=first):
        yield Span(iteration, begin, end)


def _noted(folder: Path) -> list[Began]:
    """What all workers noted (``train_with.py``), in order of time."""
    lines = [line for path in folder.glob("steps*.jsonl") for line in path.read_text().splitlines()]
    return sorted((Began(**json.loads(line)) for line in lines), key=lambda began: began.at)


def _all_spans(outcome: SwiftOutcome, failure: Failure, noted: Sequence[Began]) -> Iterator[Span]:
    """Before the failure; repeated, by the slowest that replays or by all; and live again."""
    assert outcome.killed is not None
    killed, interrupted = outcome.killed, failure.kill_iteration
    all_ranks = range(failure.machines)
    before = [began for began in noted if began.at < killed]
    after = [began for began in noted if began.at > outcome.recoveries[0]["detected"]]
    lost = {began.rank for began in after if began.mode == "replay"} or {*all_ranks}
    first = min(began.iteration for began in after if began.rank in lost)
    yield from _spans([at - killed for at in _reached(before, all_ranks, 0)], 0)
    again = _reached(after, lost, first)[: interrupted - first + 1]
    yield from _spans([at - killed for at in again], first)
    onward = [began for began in after if began.mode != "replay"]
    yield from _spans([at - killed for at in _reached(onward, all_ranks, interrupted)], interrupted)


def _reached(noted: Sequence[Began], ranks: Collection[int], first: int) -> list[float]:
    """When the last of some workers had completed ``first`` iterations, one more, and so on."""
    found = []
    for completed in range(first, max((began.iteration for began in noted), default=0) + 1):
        times = [
            [began.at for began in noted if began.rank == rank and began.iteration >= completed]
            for rank in ranks
        ]
        if not all(times):
            break
        found.append(max(map(min, times)))
    return found
