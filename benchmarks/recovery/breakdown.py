"""Where a training with failures spent its time, in the format of ``swift-sim --calibrate``.

As in :mod:`examples.disturbed`: from the traces of the recoveries, and the work of each worker in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from examples.commands import CommandError
from examples.disturbed import Failure, Works, replay_began, works_of
from swift_ft.planning.simulation.inputs import MeasuredRecovery
from swift_ft.storage.store import Store


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
    failure: Failure, iterations: int, machines: Sequence[int], report: dict[str, Any], store: Store
) -> Breakdown:
    """The breakdown of a training in which ``machines`` were killed, in that order.

    Args:
        failure: what was trained.
        iterations: how many iterations it had.
        machines: the killed machines, in order of time; at least one is not among them.
        report: as ``swift-run --events-out`` wrote it.
        store: of the run.

    Raises:
        CommandError: if one of the recoveries was no replay, or not all of the run is known.
    """
    kills = [entry["at"] for entry in report["events"] if entry["event"] == "FaultInjected"]
    modes = [recovery["mode"] for recovery in report["recoveries"]]
    if len(kills) != len(machines) or modes != ["replay"] * len(machines):
        raise CommandError(f"{len(kills)} of {len(machines)} kills, with the recoveries {modes}")
    first, last = works_of(store, failure.machines)
    survivor = next(rank for rank in range(failure.machines) if rank not in machines)
    began = max(works[0].began or 0.0 for works in first.values())
    ended = max(works[-1].until or 0.0 for works in last.values())
    iteration_s = _calm_iteration_s(last[survivor], iterations)
    recoveries = [
        measured(recovery, killed, _loaded(recovery, machine), failure.checkpoint_every, iteration_s)
        for recovery, killed, machine in zip(report["recoveries"], kills, machines, strict=True)
    ]
    return Breakdown(
        failure.machines,
        iterations,
        failure.checkpoint_every,
        ended - began,
        iteration_s,
        tuple((at - began, machine) for at, machine in zip(kills, machines, strict=True)),
        tuple(recoveries),
    )


def _loaded(recovery: dict[str, Any], machine: int) -> float:
    if (began := replay_began(recovery, machine)) is None:
        raise CommandError(f"it is not known when machine {machine} began to replay")
    return began


def _calm_iteration_s(works: Works, iterations: int) -> float:
    """Mean time of a survivor's iterations. In each generation, what an interruption ended does not count."""
    if (steps := sum(work.steps for work in works)) != iterations:
        raise CommandError(f"only {steps} of {iterations} iterations are known")
    ends = [work.until if work.interrupted is None else work.interrupted for work in works]
    return sum((end or 0.0) - (work.began or 0.0) for work, end in zip(works, ends, strict=True)) / steps


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
