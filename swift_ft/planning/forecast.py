"""Which way each machine would come back, and what that would cost (paper §3, §5.4). Pure.

The way is not guessed: the loss of the machine is put to the function that plans recoveries
(:func:`swift_ft.recovery.plan.make_plan`), as the reports of an ordinary one, so that both cannot disagree.

Seconds are the paper's recovery time (§7): from when the replacement has joined until all are back in the
iteration of the failure, half a checkpoint interval after the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from swift_ft.planning.advisor import Advice
from swift_ft.planning.costs import Costs, times, total
from swift_ft.planning.job import Job
from swift_ft.planning.presets import Fact
from swift_ft.planning.units import format_bytes, format_seconds
from swift_ft.recovery.events import Reported
from swift_ft.recovery.plan import Plan, Way, make_plan

__all__ = ["Forecast", "Protection", "WayBack", "forecast"]


class Protection(StrEnum):
    """What brings a machine's state back (§3)."""

    REPLICATION = "replication"
    """A replica on another machine gives it."""
    LOGGING = "logging"
    """It is rebuilt from the checkpoint and the logs of others, who keep theirs."""
    CHECKPOINT = "checkpoint"
    """Everybody goes back to the global checkpoint."""


@dataclass(frozen=True)
class WayBack:
    """How one machine would come back.

    Attributes:
        machine: its slot.
        way: what brings its state back.
        why: in words.
        rolled_back: the machines whose state goes back to the checkpoint.
        expected_s: seconds until all are back; None where something was not measured.
        load_s: of these, loading the checkpoint.
        transfer_s: of these, receiving from replicas.
        again_s: of these, computing again what was lost: replayed, or repeated by everybody.
        checkpoint_s: what it would take if everybody went back to the checkpoint.
    """

    machine: int
    way: Protection
    why: str
    rolled_back: tuple[int, ...]
    expected_s: float | None
    load_s: float | None
    transfer_s: float | None
    again_s: float | None
    checkpoint_s: float | None


@dataclass(frozen=True)
class Forecast:
    """How a job would survive the loss of each of its machines.

    Attributes:
        machines: by slot.
        logging: whether logging is worth doing (§5.4); None where nothing is logged, or nothing is measured.
        facts: the numbers that this rests on, each with its source.
        unknown: what was not measured, and how it can be had.
    """

    machines: tuple[WayBack, ...]
    logging: Advice | None
    facts: tuple[Fact, ...]
    unknown: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        advice = self.logging.to_dict() if self.logging is not None else None
        return {**asdict(self), "logging": advice}

    def __str__(self) -> str:
        """A table for people."""
        head = ("machine", "way back", "takes", "load", "transfer", "again", "by checkpoint", "because")
        rows = [head, *map(_row, self.machines)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        notes = [f"{fact.name}: {_amount(fact)} ({fact.source})" for fact in self.facts]
        if self.logging is not None:
            worth = "is" if self.logging.worth_it else "is not"
            notes = [f"Logging {worth} worth it.", *self.logging.reasons, *notes]
        return "\n".join([*table, *notes, *self.unknown])


def forecast(job: Job) -> Forecast:
    """What the loss of each machine would mean."""
    costs = Costs(job)
    ways = tuple(_way_back(costs, slot) for slot in range(job.machines))
    advice = costs.advice([way.again_s for way in ways if way.way == Protection.LOGGING])
    return Forecast(ways, advice, costs.facts(), costs.unknown())


def _way_back(costs: Costs, slot: int) -> WayBack:
    job = costs.job
    plan = _plan_of_loss(job, slot)
    rebuilt = {rank for rank, task in plan.tasks.items() if task.load is not None}
    moved = {rank for transfer in plan.transfers for rank in transfer.targets}
    everybody = {*range(len(job.workers))}
    repeat_s = times(job.lost_iterations, costs.iteration_s)
    again_s: float | None = 0.0
    if plan.way == Way.REPLICA:
        way = Protection.REPLICATION
    elif plan.way == Way.REPLAY:
        way, again_s = Protection.LOGGING, times(job.lost_iterations, costs.replay_s(plan.tasks))
    else:
        way, again_s, rebuilt = Protection.CHECKPOINT, repeat_s, everybody
    load_s, transfer_s = costs.load_s(rebuilt), costs.transfer_s(moved - rebuilt)
    return WayBack(
        machine=slot,
        way=way,
        why=_why(job, slot, way, plan),
        rolled_back=tuple(sorted({rank // job.per_machine for rank in rebuilt})),
        expected_s=total(load_s, transfer_s, again_s),
        load_s=load_s,
        transfer_s=transfer_s,
        again_s=again_s,
        checkpoint_s=total(costs.load_s(everybody), repeat_s),
    )


def _plan_of_loss(job: Job, slot: int) -> Plan:
    """The plan for an ordinary loss: one machine, some iterations after a committed checkpoint."""
    standings = {
        rank: Reported(
            rank,
            generation=2,
            iteration=None if rank in job.ranks(slot) else 1,
            live=rank not in job.ranks(slot),
            stages=worker.stages,
            pipeline_known=True,
            holds=worker.holds,
            pipeline=worker.pipeline,
            group=job.group(rank // job.per_machine),
        )
        for rank, worker in enumerate(job.workers)
    }
    return make_plan(standings, workers=job.per_machine, committed=0)


def _why(job: Job, slot: int, way: Protection, plan: Plan) -> str:
    if way == Protection.CHECKPOINT:
        return plan.reason or "no other machine has any state"
    here = job.ranks(slot)
    elsewhere = {worker.holds for rank, worker in enumerate(job.workers) if rank not in here}
    if way == Protection.REPLICATION:
        sources = {transfer.source // job.per_machine for transfer in plan.transfers}
        return f"{_parts(job, here)}: a replica is on {_machines(sources)}"
    alone = _parts(job, [rank for rank in here if job.workers[rank].holds not in elsewhere])
    back = {rank // job.per_machine for rank, task in plan.tasks.items() if task.load is not None} - {slot}
    together = f"; back with it: {_machines(back)}" if back else ""
    return f"{alone}: no replica is elsewhere, and what it received is in the logs of others{together}"


def _parts(job: Job, ranks: Sequence[int]) -> str:
    return ", ".join(dict.fromkeys(name for rank in ranks for name in job.workers[rank].holds))


def _machines(slots: Set[int]) -> str:
    return f"machine{'s' * (len(slots) > 1)} {', '.join(map(str, sorted(slots)))}"


def _row(way: WayBack) -> tuple[str, ...]:
    spans = (way.expected_s, way.load_s, way.transfer_s, way.again_s, way.checkpoint_s)
    shown = ["?" if seconds is None else format_seconds(seconds) for seconds in spans]
    return (str(way.machine), way.way, *shown, way.why)


def _amount(fact: Fact) -> str:
    if fact.unit.startswith("bytes"):
        return format_bytes(fact.value) + fact.unit.removeprefix("bytes")
    return format_seconds(fact.value) if fact.unit == "s" else f"{fact.value:g}"
