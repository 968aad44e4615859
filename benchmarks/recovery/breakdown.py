"""Where a training with failures spent its time, in the format of ``swift-sim --calibrate``.

Read from outside, as in :mod:`examples.disturbed`: from the journal and the workers' progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from examples.commands import CommandError
from examples.disturbed import Failure, ProgressLog
from swift_ft.planning.simulation.calibration import MeasuredRecovery


@dataclass(frozen=True)
class Breakdown:
    """One executed training.

    Attributes:
        machines: how many trained.
        iterations: how many it had.
        checkpoint_every: iterations between two checkpoints.
        training_s: from the start of the first iteration to the end of the last one.
        iteration_s: mean time of an iteration that no failure touched, its share of checkpoints included.
        failures: seconds after the start of the first iteration, and which machine was killed.
        recoveries: the recovery from each of them.
    """

    machines: int
    iterations: int
    checkpoint_every: int
    training_s: float
    iteration_s: float
    failures: tuple[tuple[float, int], ...]
    recoveries: tuple[MeasuredRecovery, ...]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary, which ``swift-sim --calibrate`` reads."""
        return asdict(self)


def read_breakdown(
    failure: Failure, iterations: int, machines: Sequence[int], report: dict[str, Any], progress: ProgressLog
) -> Breakdown:
    """The breakdown of a training in which ``machines`` were killed, in that order.

    Args:
        failure: what was trained.
        iterations: how many iterations it had.
        machines: the killed machines, in order of time.
        report: as ``swift-run --events-out`` wrote it.
        progress: what the workers reported.

    Raises:
        CommandError: if one of the recoveries was no replay, or not all of the run was seen.
    """
    kills = [entry["at"] for entry in report["events"] if entry["event"] == "FaultInjected"]
    modes = [recovery["mode"] for recovery in report["recoveries"]]
    if len(kills) != len(machines) or modes != ["replay"] * len(machines):
        raise CommandError(f"{len(kills)} of {len(machines)} kills, with the recoveries {modes}")
    ends = _ends(progress, range(failure.machines))
    if set(ends) != set(range(iterations + 1)):
        raise CommandError(f"only the iterations {sorted(ends)} were seen")
    lives = [recovery["live"] for recovery in report["recoveries"]]
    disturbed = list(zip(kills, lives, strict=True))
    calm = [
        ends[i + 1] - ends[i]
        for i in range(iterations)
        if not any(begin < ends[i + 1] and ends[i] < end for begin, end in disturbed)
    ]
    iteration_s = sum(calm) / len(calm)
    recoveries = [
        measured(recovery, killed, _loaded(progress, recovery), failure.checkpoint_every, iteration_s)
        for recovery, killed in zip(report["recoveries"], kills, strict=True)
    ]
    return Breakdown(
        failure.machines,
        iterations,
        failure.checkpoint_every,
        ends[iterations] - ends[0],
        iteration_s,
        tuple((at - ends[0], machine) for at, machine in zip(kills, machines, strict=True)),
        tuple(recoveries),
    )


def measured(
    recovery: dict[str, Any], killed: float, loaded: float, checkpoint_every: int, iteration_s: float
) -> MeasuredRecovery:
    """One recovery by replay, from its timeline in the journal; ``loaded`` is when the replay began."""
    return MeasuredRecovery(
        strategy="swift_logging",
        startup_s=recovery["reported"] - killed,
        restore_s=loaded - recovery["reported"],
        replay_s=recovery["live"] - loaded,
        replayed_iterations=recovery["resume"] % checkpoint_every,
        iteration_s=iteration_s,
    )


def _loaded(progress: ProgressLog, recovery: dict[str, Any]) -> float:
    """When a replacement reported that it replays."""
    return next(p.at for _, p in progress if p.mode == "replay" and p.at > recovery["detected"])


def _ends(progress: ProgressLog, ranks: Sequence[int]) -> dict[int, float]:
    """By number of completed iterations: when the last rank that trained live first had them."""
    first: dict[tuple[int, int], float] = {}
    for rank, p in progress:
        if p.mode in ("live", "finished"):
            first.setdefault((p.iteration, rank), p.at)
    known = {iteration for iteration, _ in first}
    return {i: max(first[i, rank] for rank in ranks if (i, rank) in first) for i in sorted(known)}
