"""Faults as data: which machine fails when, where and how. The demo and the tests use it, and so can you.

As text, for ``swift-run --inject``::

    kill machine=1 iteration=47 point=forward microbatch=3; stop worker=2 iteration=50 point=optimizer
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from swift_ft.errors import UsageError

__all__ = ["Action", "Fault", "Point", "fail_at", "parse_faults"]


class Action(StrEnum):
    """What happens to the target."""

    KILL = "kill"
    """SIGKILL."""
    STOP = "stop"
    """SIGSTOP: it falls silent, but its sockets stay open."""
    RAISE = "raise"
    """The script raises an exception of its own."""
    BREAK = "break"
    """The worker's connections break, and nobody dies."""


class Point(StrEnum):
    """Where in an iteration it happens."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    """A bucket of gradients is full on this worker; its all-reduce has not begun."""
    REDUCING = "reducing"
    """The all-reduce of a bucket has begun."""
    REDUCED = "reduced"
    """The all-reduce of a bucket is complete on this worker."""
    UPDATE = "update"
    """The parameters of a bucket are updated, where the optimizer is wait-free."""
    OPTIMIZER = "optimizer"
    """Inside ``optimizer.step()``, when the update is done and nothing else knows."""
    BETWEEN = "between"
    """After the iteration, before the next one."""
    CHECKPOINT = "checkpoint"
    """When this worker's part of the checkpoint after ``iteration`` is written, and not yet reported."""
    COMMIT = "commit"
    """When all parts are there, before the marker is written (worker 0)."""
    LEAVE = "leave"
    """When a worker has left its group, before it learns what to do.

    Here, at ``report`` and at ``join``, ``iteration`` says how many it has completed.
    """
    REPORT = "report"
    """In a recovery, before the worker says where it stands; a replacement is at iteration 0."""
    JOIN = "join"
    """Before the group of a new generation is formed."""
    LOAD = "load"
    """In a recovery, before the checkpoint is loaded."""
    TRANSFER = "transfer"
    """In a recovery, while state goes from a replica to others."""
    REPLAY = "replay"
    """In a replay, when ``iteration`` begins."""
    HELP = "help"
    """In a replay of others, when a helper begins ``iteration``."""


class Target(StrEnum):
    """What fails."""

    MACHINE = "machine"
    """The agent and all of its workers."""
    WORKER = "worker"
    """The worker's process alone."""
    AGENT = "agent"
    """The agent's process alone."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It happens once in a run, even if the iteration comes again.

    Attributes:
        action: what happens.
        target: to what.
        index: the machine's slot, or the worker's rank.
        iteration: when.
        point: where in the iteration.
        microbatch: for ``forward`` and ``backward``: before which microbatch; None for the first one met.
        bucket: for points of a bucket of gradients or of a transfer: which; None for the first one met.
    """

    action: Action
    target: Target
    index: int
    iteration: int
    point: Point = Point.BETWEEN
    microbatch: int | None = None
    bucket: int | None = None

    @property
    def part(self) -> int | None:
        """The microbatch or the bucket."""
        return self.microbatch if self.bucket is None else self.bucket

    def __str__(self) -> str:
        """As :func:`parse_faults` reads it."""
        text = f"{self.action} {self.target}={self.index} iteration={self.iteration} point={self.point}"
        for name in ("microbatch", "bucket"):
            if (number := getattr(self, name)) is not None:
                text += f" {name}={number}"
        return text


def fail_at(
    *,
    iteration: int,
    machine: int | None = None,
    worker: int | None = None,
    point: str = "forward",
    microbatch: int | None = None,
    bucket: int | None = None,
    action: str = "kill",
) -> Fault:
    """A fault, in words: ``fail_at(machine=1, iteration=8, point="forward", microbatch=3)``."""
    target, index = (Target.MACHINE, machine) if worker is None else (Target.WORKER, worker)
    if index is None:
        raise UsageError("A fault needs a machine or a worker.")
    return Fault(Action(action), target, index, iteration, Point(point), microbatch, bucket)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Read faults from text; they are separated by semicolons.

    Raises:
        UsageError: with the part that cannot be read.
    """
    return tuple(_parse_one(part.strip()) for part in text.split(";") if part.strip())


def _parse_one(text: str) -> Fault:
    try:
        action, *pairs = text.split()
        facts = dict(pair.split("=", 1) for pair in pairs)
        target = next(Target(name) for name in list(facts) if name in set(Target))
        fault = Fault(
            Action(action),
            target,
            int(facts.pop(target)),
            int(facts.pop("iteration")),
            Point(facts.pop("point", Point.BETWEEN)),
            int(facts.pop("microbatch")) if "microbatch" in facts else None,
            int(facts.pop("bucket")) if "bucket" in facts else None,
        )
        if facts:
            raise ValueError(f"unknown word {next(iter(facts))!r}")  # noqa: TRY301  (told below, with all others)
    except (ValueError, KeyError, StopIteration) as error:
        raise UsageError(
            f"The fault {text!r} cannot be read ({error}); write it like "
            "'kill machine=1 iteration=47 point=forward microbatch=3'."
        ) from error
    return fault
