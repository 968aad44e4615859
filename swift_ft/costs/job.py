"""A job without failures: what each worker holds, and what it measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.costs.schedule_orders import Schedule
from swift_ft.errors import UsageError


@dataclass(frozen=True)
class Measured:
    """The measurements of one worker's first iterations; None for those that are missing.

    Attributes:
        iteration_s: seconds per iteration.
        compute_s: of these, computing.
        bubble_s: of these, waiting for messages.
        sent: payload bytes per iteration to each other machine, by slot.
        state_bytes: parameters, buffers and optimizer state.
        save_bytes_per_s: throughput of writing its part of a checkpoint.
        link_bytes_per_s: throughput to the next machine.
        copy_bytes_per_s: throughput from its device to the host.
        snapshot_every: iterations between two copies of its state to another machine's memory, as chosen
            last; None without copies.
    """

    iteration_s: float | None = None
    compute_s: float | None = None
    bubble_s: float | None = None
    sent: Mapping[int, int] = field(default_factory=dict)
    state_bytes: int | None = None
    save_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    copy_bytes_per_s: float | None = None
    snapshot_every: int | None = None


@dataclass(frozen=True)
class Worker:
    """The parts of the model on one worker.

    Attributes:
        holds: names of the parts whose whole state it has; workers that hold the same are replicas.
        stages: its pipeline stages.
        pipeline: the number of its pipeline among that pipeline's replicas.
        measured: in its first iterations.
    """

    holds: tuple[str, ...]
    stages: tuple[int, ...] = ()
    pipeline: int = 0
    measured: Measured = field(default_factory=Measured)


@dataclass(frozen=True)
class ScriptGroup:
    """A group on which the script itself communicates.

    Attributes:
        members: global ranks.
        together: no log has what it communicates, so its members are rebuilt and replay together.
        nbytes: what it gives to a worker in one iteration, at most.
        why: the call that let its members replay together; empty if they do not, and if they are lost
            together anyway.
    """

    members: tuple[int, ...]
    together: bool
    nbytes: int
    why: str = ""


@dataclass(frozen=True)
class Job:
    """A job without failures.

    Attributes:
        workers: by rank; each machine has as many, in order.
        per_machine: workers per machine.
        checkpoint_interval: iterations between two global checkpoints.
        groups: by machine; the machines of a group recover together (§5.3). Empty if each is its own group.
        script: the groups on which the script itself communicates, as far as it has used them.
        snapshot_every: iterations between two copies to another machine's memory; None without copies.
        domains: by machine, its failure domain; empty if each is one of its own.
        layers: of a model whose layers can move; empty for any other, and as long as nothing is measured.
        layout: the number of these layers on each stage, of all pipelines one after the other.
        schedule: of the pipeline; None if it is none that can be planned for.
        microbatches: of an iteration, of each pipeline.
        counts: the same by pipeline, where they have unlike numbers; else empty.
        shares_microbatches: they can move to other pipelines.
    """

    workers: tuple[Worker, ...]
    per_machine: int
    checkpoint_interval: int
    groups: tuple[int, ...] = ()
    script: tuple[ScriptGroup, ...] = ()
    snapshot_every: int | None = None
    domains: tuple[str, ...] = ()
    layers: tuple[LayerProfile, ...] = ()
    layout: tuple[int, ...] = ()
    schedule: Schedule | None = None
    microbatches: int = 0
    counts: tuple[int, ...] = ()
    shares_microbatches: bool = False

    def __post_init__(self) -> None:
        if self.per_machine < 1 or not self.workers or len(self.workers) % self.per_machine:
            raise UsageError(
                f"{len(self.workers)} workers do not fill machines of {self.per_machine}: "
                "give all machines the same number of workers"
            )
        if self.checkpoint_interval < 1:
            raise UsageError("the checkpoint interval must be at least one iteration")
        if self.groups and len(self.groups) != self.machines:
            raise UsageError(
                f"{len(self.groups)} groups are given for {self.machines} machines: give one per machine"
            )

    @property
    def machines(self) -> int:
        """The number of machines."""
        return len(self.workers) // self.per_machine

    @property
    def pipelines(self) -> tuple[int, ...]:
        """By which workers name their pipelines, ascending."""
        return tuple(sorted({worker.pipeline for worker in self.workers}))

    def pipeline_of(self, slot: int) -> int:
        """The pipeline of a machine, or of its first worker."""
        return self.workers[slot * self.per_machine].pipeline

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
