"""A training in which nothing has failed: what is where, and what its workers measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swift_ft.errors import UsageError

__all__ = ["Job", "Measured", "Worker"]


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
