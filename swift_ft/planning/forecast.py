"""Which way each machine would come back, and what that would cost (paper §3, §5.4). Pure.

The way is not guessed: the loss of the machine is put to the function that plans recoveries
(:func:`swift_ft.recovery.plan.make_plan`), as the reports of an ordinary one, so that both cannot disagree.

Seconds are the paper's recovery time (§7): from when the replacement has joined until all are back in the
iteration of the failure, half a checkpoint interval after the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

from swift_ft.errors import UsageError
from swift_ft.planning.advisor import Advice, LoggingQuestion, advise
from swift_ft.planning.presets import Fact
from swift_ft.planning.units import format_bytes, format_seconds
from swift_ft.recovery.events import Reported
from swift_ft.recovery.plan import Plan, Task, Way, make_plan

__all__ = ["Forecast", "Job", "Measured", "Protection", "WayBack", "Worker", "forecast"]


class Protection(StrEnum):
    """What brings a machine's state back (§3)."""

    REPLICATION = "replication"
    """A replica on another machine gives it."""
    LOGGING = "logging"
    """It is rebuilt from the checkpoint and the logs of others, who keep theirs."""
    CHECKPOINT = "checkpoint"
    """Everybody goes back to the global checkpoint."""


@dataclass(frozen=True)
class Measured:
    """What one worker measured in its first iterations; None for what it has not.

    Attributes:
        iteration_s: seconds per iteration.
        compute_s: of these, at work.
        bubble_s: of these, waiting for messages.
        sent: payload bytes per iteration to each other machine, by slot.
        state_bytes: parameters, buffers and optimizer state.
        save_bytes_per_s: at which its part of a checkpoint was written.
        link_bytes_per_s: to the next machine.
        copy_bytes_per_s: from its device to the host.
    """

    iteration_s: float | None = None
    compute_s: float | None = None
    bubble_s: float | None = None
    sent: Mapping[int, int] = field(default_factory=dict)
    state_bytes: int | None = None
    save_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    copy_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Worker:
    """What is on one worker.

    Attributes:
        holds: names of the parts whose whole state it has; who holds the same is a replica.
        stages: its pipeline stages.
        pipeline: tells the pipeline of its stages from the replicas of that pipeline.
        measured: in its first iterations.
    """

    holds: tuple[str, ...]
    stages: tuple[int, ...] = ()
    pipeline: int = 0
    measured: Measured = field(default_factory=Measured)


@dataclass(frozen=True)
class Job:
    """A training in which nothing has failed.

    Attributes:
        workers: by rank; each machine has as many, in order.
        per_machine: workers per machine.
        checkpoint_interval: iterations between two global checkpoints.
        groups: by machine; those of one group recover together (§5.3). Empty where each is one of its own.
    """

    workers: tuple[Worker, ...]
    per_machine: int
    checkpoint_interval: int
    groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.per_machine < 1 or not self.workers or len(self.workers) % self.per_machine:
            raise UsageError(
                f"{len(self.workers)} workers are on no machines of {self.per_machine}: each has as many"
            )
        if self.checkpoint_interval < 1:
            raise UsageError("the checkpoint interval must be at least one iteration")
        if self.groups and len(self.groups) != self.machines:
            raise UsageError(f"{len(self.groups)} groups are told for {self.machines} machines: one for each")

    @property
    def machines(self) -> int:
        """How many there are."""
        return len(self.workers) // self.per_machine

    @property
    def lost_iterations(self) -> float:
        """Between the last checkpoint and a failure, on average."""
        return self.checkpoint_interval / 2

    def group(self, slot: int) -> int:
        """The group of a machine."""
        return self.groups[slot] if self.groups else slot

    def ranks(self, slot: int) -> range:
        """The workers of a machine."""
        return range(slot * self.per_machine, (slot + 1) * self.per_machine)

    def logged(self, rank: int) -> int:
        """Bytes per iteration that a worker logs: all that it sends to machines of other groups (§5.4)."""
        own = self.group(rank // self.per_machine)
        sent = self.workers[rank].measured.sent
        return sum(size for slot, size in sent.items() if self.group(slot) != own)


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
    costs = _Costs(job)
    ways = tuple(_way_back(costs, slot) for slot in range(job.machines))
    advice = costs.advice([way for way in ways if way.way == Protection.LOGGING])
    return Forecast(ways, advice, costs.facts(), costs.unknown())


def _way_back(costs: _Costs, slot: int) -> WayBack:
    job = costs.job
    plan = _plan_of_loss(job, slot)
    rebuilt = {rank for rank, task in plan.tasks.items() if task.load is not None}
    moved = {rank for transfer in plan.transfers for rank in transfer.targets}
    everybody = {*range(len(job.workers))}
    repeat_s = _times(job.lost_iterations, costs.iteration_s)
    again_s: float | None = 0.0
    if plan.way == Way.REPLICA:
        way = Protection.REPLICATION
    elif plan.way == Way.REPLAY:
        way, again_s = Protection.LOGGING, _times(job.lost_iterations, costs.replay_s(plan.tasks))
    else:
        way, again_s, rebuilt = Protection.CHECKPOINT, repeat_s, everybody
    load_s, transfer_s = costs.load_s(rebuilt), costs.transfer_s(moved - rebuilt)
    return WayBack(
        machine=slot,
        way=way,
        why=_why(job, slot, way, plan),
        rolled_back=tuple(sorted({rank // job.per_machine for rank in rebuilt})),
        expected_s=_total(load_s, transfer_s, again_s),
        load_s=load_s,
        transfer_s=transfer_s,
        again_s=again_s,
        checkpoint_s=_total(costs.load_s(everybody), repeat_s),
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


class _Costs:
    """Seconds, from what was measured. All workers are taken to measure alike where one has not."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.iteration_s = self._of(lambda m: m.iteration_s, max)
        self.link = self._of(lambda m: m.link_bytes_per_s, median)
        self.copy = self._of(lambda m: m.copy_bytes_per_s, median)
        self.save = self._of(lambda m: m.save_bytes_per_s, median)

    def _of(
        self, read: Callable[[Measured], float | None], take: Callable[[Sequence[float]], float]
    ) -> float | None:
        found = [value for worker in self.job.workers if (value := read(worker.measured)) is not None]
        return take(found) if found else None

    def _state(self, ranks: Set[int]) -> list[int] | None:
        sizes = [self.job.workers[rank].measured.state_bytes for rank in sorted(ranks)]
        return None if None in sizes else [size for size in sizes if size is not None]

    def load_s(self, ranks: Set[int]) -> float | None:
        """Each loads its own part, all at once, as fast as one was written."""
        sizes = self._state(ranks)
        return _over(max(sizes, default=0), self.save) if sizes is not None else None

    def transfer_s(self, ranks: Set[int]) -> float | None:
        """Over the one link of the lost machine."""
        sizes = self._state(ranks)
        return _over(sum(sizes), self.link) if sizes is not None else None

    def replay_s(self, tasks: Mapping[int, Task]) -> float | None:
        """Seconds per iteration of the slowest portion, each as a group of §5.3."""
        replaying = {rank: task.portion or (rank,) for rank, task in tasks.items() if task.load is not None}
        return _largest([self._portion_s(ranks) for ranks in set(replaying.values())])

    def _portion_s(self, ranks: tuple[int, ...]) -> float | None:
        """``R(G)``: the computation of its machines, and what they send each other over the link."""
        by_slot: dict[int, list[float | None]] = {}
        for rank in ranks:
            compute_s = self.job.workers[rank].measured.compute_s
            by_slot.setdefault(rank // self.job.per_machine, []).append(compute_s)
        inside = sum(
            size
            for rank in ranks
            for slot, size in self.job.workers[rank].measured.sent.items()
            if slot in by_slot and slot != rank // self.job.per_machine
        )
        return _total(*map(_largest, by_slot.values()), _over(inside, self.link))

    def advice(self, ways: Sequence[WayBack]) -> Advice | None:
        """Whether logging is worth it, for the machines that it would bring back (§5.4)."""
        job, ranks = self.job, range(len(self.job.workers))
        parts = {worker.holds: rank for rank, worker in enumerate(job.workers)}
        state = self._state(set(parts.values()))
        again = [way.again_s for way in ways if way.again_s is not None]
        bubbles = [worker.measured.bubble_s for worker in job.workers]
        if not again or not state or self.copy is None or not self.iteration_s or None in bubbles:
            return None
        copy = self.copy
        # The sender whose bubble leaves least room: the one that would slow the others down.
        tight = max(ranks, key=lambda rank: job.logged(rank) / copy - (bubbles[rank] or 0.0))
        return advise(
            LoggingQuestion(
                log_bytes_per_iteration=sum(map(job.logged, ranks)),
                busiest_sender_bytes=job.logged(tight),
                model_bytes=sum(state),
                checkpoint_interval=job.checkpoint_interval,
                iteration_s=self.iteration_s,
                copy_bandwidth=copy,
                bubble=min((bubbles[tight] or 0.0) / self.iteration_s, 0.999),
                replay_s=sum(again) / len(again) / job.lost_iterations,
            )
        )

    def facts(self) -> tuple[Fact, ...]:
        """What was measured, and what was assumed."""
        job = self.job
        logged = sum(map(job.logged, range(len(job.workers))))
        found = (
            ("iterations to make up for", job.lost_iterations, "", "assumed: half a checkpoint interval"),
            ("iteration", self.iteration_s, "s", "measured: the slowest worker's median"),
            ("logged per iteration", logged if self.iteration_s else None, "bytes", "measured, all workers"),
            ("state of the largest worker", self._largest_state(), "bytes", "measured"),
            ("link between machines", self.link, "bytes/s", "measured: a short message, at the start"),
            ("copy to the host", self.copy, "bytes/s", "measured: a short copy, at the start"),
            ("writing a checkpoint", self.save, "bytes/s", "measured, per worker: the last part"),
            ("loading a checkpoint", self.save, "bytes/s", "assumed: as fast as writing"),
        )
        return tuple(Fact(name, value, unit, source) for name, value, unit, source in found if value)

    def _largest_state(self) -> float | None:
        return self._of(lambda m: m.state_bytes, max)

    def unknown(self) -> tuple[str, ...]:
        """What is missing for an answer in seconds."""
        if any(worker.measured.iteration_s is None for worker in self.job.workers):
            return ("Not all is measured yet: ask again after the first ten iterations.",)
        if self.save is None:
            return ("No part of a checkpoint has been written yet: ask again after the first one.",)
        return ()


def _times(count: float, seconds: float | None) -> float | None:
    return None if seconds is None else count * seconds


def _over(size: float, rate: float | None) -> float | None:
    """Seconds for some bytes; nothing takes no time at any rate."""
    if not size:
        return 0.0
    return None if not rate else size / rate


def _total(*parts: float | None) -> float | None:
    return None if None in parts else sum(part for part in parts if part is not None)


def _largest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known, default=0.0) if len(known) == len(values) else None


def _row(way: WayBack) -> tuple[str, ...]:
    times = (way.expected_s, way.load_s, way.transfer_s, way.again_s, way.checkpoint_s)
    shown = ["?" if seconds is None else format_seconds(seconds) for seconds in times]
    return (str(way.machine), way.way, *shown, way.why)


def _amount(fact: Fact) -> str:
    if fact.unit.startswith("bytes"):
        return format_bytes(fact.value) + fact.unit.removeprefix("bytes")
    return format_seconds(fact.value) if fact.unit == "s" else f"{fact.value:g}"
