"""A forecast of how each machine would recover, and at which cost (paper §3, §5.4). Pure.

The forecast asks the function that plans recoveries (:func:`swift_ft.recovery.plan.make_plan`), with the
reports of an ordinary loss. So forecast and recovery cannot disagree.

Seconds are the paper's recovery time (§7): from the replacement's join until all workers are back in the
iteration of the failure, half a checkpoint interval after the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from swift_ft.costs.job import Job, ScriptGroup
from swift_ft.planning.advisor import Advice
from swift_ft.planning.costs import Costs, Movements, times, total
from swift_ft.planning.presets import Fact
from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.layout.stage_layers import replicated_layers
from swift_ft.recovery.memory import CopyPlacement
from swift_ft.recovery.plan import Plan, RecoveryMode, make_plan
from swift_ft.units import format_bytes, format_seconds, named


class Protection(StrEnum):
    """The way in which a machine's state is recovered (§3)."""

    REPLICATION = "replication"
    """A replica on another machine sends it."""
    LOGGING = "logging"
    """It is rebuilt from the checkpoint and the logs of survivors, which keep their state."""
    MEMORY = "memory"
    """All workers return to copies in memory, of a few iterations ago; the lost one is on another machine."""
    CHECKPOINT = "checkpoint"
    """All workers roll back to the global checkpoint."""


@dataclass(frozen=True)
class MachineForecast:
    """The recovery of one machine.

    Attributes:
        machine: its slot.
        protection: how its state is recovered.
        why: the reason, in words.
        rolled_back: the machines whose state rolls back to the checkpoint, or to a copy in memory.
        expected_s: seconds until all are back; None where something was not measured.
        load_s: of these, loading the checkpoint.
        transfer_s: of these, receiving from replicas, or from the memory of another machine.
        again_s: of these, recomputing lost iterations: replayed by some workers, or repeated by all.
        checkpoint_s: seconds if all workers rolled back to the checkpoint.
        host: the machine that runs its workers, too, if no other machine comes; None if it is the only one.
        hosted_s: seconds of an iteration from then on; None where something was not measured.
        rerouted: microbatches of each pipeline, once other pipelines help; None where they cannot.
        rerouted_s: seconds of an iteration then, before any layer has moved.
        shared_s: the same, once the layers of a LayerStack are redistributed; None for any other model.
        is_bound: both may be longer, since the schedule or the costs of layers are not known.
    """

    machine: int
    protection: Protection
    why: str
    rolled_back: tuple[int, ...]
    expected_s: float | None
    load_s: float | None
    transfer_s: float | None
    again_s: float | None
    checkpoint_s: float | None
    host: int | None
    hosted_s: float | None
    rerouted: tuple[int, ...] | None = None
    rerouted_s: float | None = None
    shared_s: float | None = None
    is_bound: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class ScriptGroupForecast:
    """The treatment of the script's own communication on a group.

    Attributes:
        members: global ranks.
        way: in words: logged, replayed together, or the checkpoint.
        nbytes: what it gives to a worker in one iteration, at most.
        why: the call that let its members replay together; empty if they do not.
    """

    members: tuple[int, ...]
    way: str
    nbytes: int
    why: str

    def __str__(self) -> str:
        """A line for people."""
        because = f" ({self.why})" if self.why else ""
        size = format_bytes(self.nbytes)
        return f"The script's group of {named('worker', self.members)}: {size}/iteration, {self.way}{because}"


@dataclass(frozen=True)
class Forecast:
    """The forecast of a job: how it would survive the loss of each of its machines.

    Attributes:
        machines: by slot.
        script: what becomes of what the script itself communicates, by group.
        logging: whether logging is worth it (§5.4); None if nothing is logged or measured.
        facts: the numbers behind the forecast, each with its source.
        unknown: what was not measured, and how to measure it.
    """

    machines: tuple[MachineForecast, ...]
    script: tuple[ScriptGroupForecast, ...]
    logging: Advice | None
    facts: tuple[Fact, ...]
    unknown: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        advice = self.logging.to_dict() if self.logging is not None else None
        machines = [machine.to_dict() for machine in self.machines]
        return {**asdict(self), "machines": machines, "logging": advice}

    def __str__(self) -> str:
        """A table for people."""
        head = ("machine", "protection", "takes", "load", "transfer", "again", "by checkpoint", "because")
        rows = [head, *map(_row, self.machines)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        notes = [f"{fact.name}: {_amount(fact)} ({fact.source})" for fact in self.facts]
        notes = [*self._without_spares(), *map(str, self.script), *notes]
        if self.logging is not None:
            worth = "is" if self.logging.worth_it else "is not"
            notes = [f"Logging {worth} worth it.", *self.logging.reasons, *notes]
        return "\n".join([*table, *notes, *self.unknown])

    def _without_spares(self) -> list[str]:
        """The outlook where no machine comes in place of a lost one."""
        hosted = [machine for machine in self.machines if machine.host is not None]
        if not hosted:
            return []
        by_host: dict[int | None, list[int]] = {}
        for machine in hosted:
            by_host.setdefault(machine.host, []).append(machine.machine)
        who = "; ".join(f"of {named('machine', lost)} machine {host}" for host, lost in by_host.items())
        longer = " or longer" if any(machine.is_bound for machine in hosted) else ""
        spans = [machine.hosted_s for machine in hosted if machine.hosted_s is not None]
        span = f" An iteration then takes {format_seconds(max(spans))}{longer}." if spans else ""
        spans = [machine.rerouted_s for machine in hosted if machine.rerouted_s is not None]
        if spans:
            span += f" Once microbatches go to other pipelines, it takes {format_seconds(max(spans))}."
        spans = [machine.shared_s for machine in hosted if machine.shared_s is not None]
        shared = f" Then layers move, and it takes {format_seconds(max(spans))}{longer}." if spans else ""
        return [f"Without a spare, another machine runs the workers of a lost one, too: {who}.{span}{shared}"]


def forecast(job: Job) -> Forecast:
    """Forecasts the recovery from the loss of each machine."""
    costs = Costs(job)
    machines = tuple(_machine_forecast(costs, slot) for slot in range(job.machines))
    advice = costs.advice(
        [machine.again_s for machine in machines if machine.protection == Protection.LOGGING]
    )
    script = tuple(_script_forecast(job, group, machines) for group in job.script)
    return Forecast(machines, script, advice, costs.facts(), costs.unknown())


def _script_forecast(
    job: Job, group: ScriptGroup, machines: Sequence[MachineForecast]
) -> ScriptGroupForecast:
    way = "logged"
    if group.together:
        ways = {machines[rank // job.per_machine].protection for rank in group.members}
        way = "all return to the checkpoint" if Protection.CHECKPOINT in ways else "replayed together"
    return ScriptGroupForecast(group.members, way, group.nbytes, group.why)


def _machine_forecast(costs: Costs, slot: int) -> MachineForecast:
    job = costs.job
    plan = _plan_of_loss(job, slot)
    moved = Movements.of(plan)
    back = {rank // job.per_machine for rank, task in plan.tasks.items() if task.load is not None}
    repeat_s = times(job.lost_iterations, costs.iteration_s)
    again_s: float | None = 0.0
    if plan.mode == RecoveryMode.REPLICA:
        protection = Protection.REPLICATION
    elif plan.mode == RecoveryMode.REPLAY:
        protection, again_s = Protection.LOGGING, times(job.lost_iterations, costs.replay_s(plan.tasks))
    elif plan.mode == RecoveryMode.MEMORY:
        protection, again_s = Protection.MEMORY, times(_interval(job) / 2, costs.iteration_s)
    else:
        protection, again_s = Protection.CHECKPOINT, repeat_s
    load_s, transfer_s = costs.load_s(moved.loading), costs.transfer_s(moved.receiving | moved.fetching)
    host = _host(job, slot)
    rerouted = None if host is None else costs.rerouted(slot, host)
    return MachineForecast(
        machine=slot,
        protection=protection,
        why=_why(job, slot, protection, plan),
        rolled_back=tuple(sorted(back)),
        expected_s=total(load_s, transfer_s, again_s),
        load_s=load_s,
        transfer_s=transfer_s,
        again_s=again_s,
        checkpoint_s=total(costs.load_s({*range(len(job.workers))}), repeat_s),
        host=host,
        hosted_s=None if host is None else costs.hosted_s(slot, host),
        rerouted=rerouted[0] if rerouted is not None else None,
        rerouted_s=rerouted[1] if rerouted is not None else None,
        shared_s=None if host is None else costs.shared_s(slot, host),
        is_bound=not costs.knows_schedule,
    )


def _host(job: Job, slot: int) -> int | None:
    """The first of the others, as `recovery/guests.py` chooses where none has a guest.

    Pipelines of a LayerStack have as many machines each: there it is the first one of its own pipeline.
    """
    others = [other for other in range(job.machines) if other != slot]
    beside = [other for other in others if job.pipeline_of(other) == job.pipeline_of(slot)]
    return min(beside if job.layout and beside else others, default=None)


def _plan_of_loss(job: Job, slot: int) -> Plan:
    """The plan for an ordinary loss: one machine, some iterations after a committed checkpoint."""
    statuses = {
        rank: StatusReported(
            rank=rank,
            generation=2,
            iteration=None if rank in job.ranks(slot) else 1,
            live=rank not in job.ranks(slot),
            stages=worker.stages,
            pipeline_known=True,
            holds=worker.holds,
            pipeline=worker.pipeline,
            layers=sum(job.layout) // len(job.pipelines),
            group=job.group(rank // job.per_machine),
            together=tuple({r for g in job.script if g.together and rank in g.members for r in g.members}),
            together_reason=next((g.why for g in job.script if g.why and rank in g.members), ""),
            **_copies(job, rank, slot),
        )
        for rank, worker in enumerate(job.workers)
    }
    layers = replicated_layers(statuses, job.layout)
    return make_plan(statuses, workers_per_machine=job.per_machine, committed=0, layers=layers)


def _interval(job: Job) -> int:
    assert job.snapshot_every is not None
    return job.snapshot_every


def _copies(job: Job, rank: int, lost: int) -> dict[str, Any]:
    """The fields of a worker's report that tell of copies: all are of the same iteration."""
    placement = CopyPlacement.of(job.domains or ("",) * job.machines, job.per_machine)
    if job.snapshot_every is None or placement is None or rank in job.ranks(lost):
        return {}
    return {"kept": (1,), "held": (1,), "held_of": placement.owners[rank]}


def _why(job: Job, slot: int, protection: Protection, plan: Plan) -> str:
    if protection == Protection.CHECKPOINT:
        return plan.reason or "no other machine has any state"
    here = job.ranks(slot)
    if protection == Protection.MEMORY:
        holders = {task.holder for rank, task in plan.tasks.items() if task.holder not in (None, rank)}
        where = _machines({holder // job.per_machine for holder in holders if holder is not None})
        return f"{plan.reason}; {where} holds a copy, at most {_interval(job)} iterations old"
    elsewhere = {worker.holds for rank, worker in enumerate(job.workers) if rank not in here}
    if protection == Protection.REPLICATION:
        sources = {transfer.source // job.per_machine for transfer in plan.transfers}
        return f"{_parts(job, here)}: a replica is on {_machines(sources)}"
    alone = _parts(job, [rank for rank in here if job.workers[rank].holds not in elsewhere])
    back = {rank // job.per_machine for rank, task in plan.tasks.items() if task.load is not None} - {slot}
    together = f"; also rolled back: {_machines(back)}" if back else ""
    return (
        f"{alone}: no replica elsewhere, and the logs of others hold the messages that it received{together}"
    )


def _parts(job: Job, ranks: Sequence[int]) -> str:
    return ", ".join(dict.fromkeys(name for rank in ranks for name in job.workers[rank].holds))


def _machines(slots: Set[int]) -> str:
    return f"machine{'s' * (len(slots) > 1)} {', '.join(map(str, sorted(slots)))}"


def _row(machine: MachineForecast) -> tuple[str, ...]:
    spans = (machine.expected_s, machine.load_s, machine.transfer_s, machine.again_s, machine.checkpoint_s)
    shown = ["?" if seconds is None else format_seconds(seconds) for seconds in spans]
    return (str(machine.machine), machine.protection, *shown, machine.why)


def _amount(fact: Fact) -> str:
    if fact.unit.startswith("bytes"):
        return format_bytes(fact.value) + fact.unit.removeprefix("bytes")
    return format_seconds(fact.value) if fact.unit == "s" else f"{fact.value:g}"
