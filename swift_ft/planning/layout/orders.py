"""In which order torch's schedules compute on each worker of a pipeline.

``torch.distributed.pipelining.schedules`` computes the same orders; a test compares them for many sizes. They
are computed here as well because planning knows nothing of torch.

All schedules are one pattern: some forward passes to warm up, then one forward and one backward pass in turn,
then the backward passes that are left. They differ in the number of warm-up passes (GPipe and LoopedBFS warm
up with all), in which stage's turn it is, and in whether the backward pass is split into inputs and weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from swift_ft.errors import UsageError

__all__ = ["Action", "Kind", "Schedule", "check_size", "in_flight", "is_allowed", "worker_order"]


class Schedule(StrEnum):
    """A schedule of torch that can be planned for."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    LOOPED_BFS = "looped-bfs"
    INTERLEAVED = "interleaved-1f1b"
    ZERO_BUBBLE = "zero-bubble"

    @property
    def is_single(self) -> bool:
        """Whether torch allows one stage per worker only."""
        return self in (Schedule.GPIPE, Schedule.ONE_F_ONE_B)


class Kind(StrEnum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward pass."""
    INPUT = "I"
    """The backward pass for the inputs' gradients only."""
    WEIGHT = "W"
    """What :attr:`INPUT` has left: the weights' gradients."""


class Action(NamedTuple):
    """One computation of a worker.

    Attributes:
        kind: what.
        stage: of which stage, counted over the pipeline.
        microbatch: for which microbatch.
    """

    kind: Kind
    stage: int
    microbatch: int


def check_size(schedule: Schedule, *, workers: int, chunks: int, microbatches: int) -> None:
    """Check what torch demands of a schedule.

    Args:
        schedule: which.
        workers: of the pipeline.
        chunks: stages per worker.
        microbatches: of an iteration.

    Raises:
        UsageError: which demand is not met, by how much, and what would do.
    """
    if min(workers, chunks, microbatches) < 1:
        raise UsageError(
            f"{workers} workers, {chunks} stages each, {microbatches} microbatches: each must be at least 1"
        )
    if schedule.is_single and chunks > 1:
        raise UsageError(
            f"{schedule} takes one stage per worker, not {chunks}: use {Schedule.INTERLEAVED}, for example"
        )
    if schedule is Schedule.ONE_F_ONE_B and microbatches < workers:
        raise UsageError(
            f"{schedule} needs at least as many microbatches as stages: {microbatches} are "
            f"{workers - microbatches} too few for {workers} stages"
        )
    if schedule in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE):
        rounds = _rounds(workers, microbatches)
        over = microbatches % rounds
        if over:
            raise UsageError(
                f"{schedule} with {workers} workers divides {microbatches} microbatches into {rounds} "
                f"rounds, and {over} are over: {microbatches - over} would do"
            )


def is_allowed(schedule: Schedule, *, workers: int, microbatches: int) -> bool:
    """Whether torch takes a schedule with one stage per worker."""
    try:
        check_size(schedule, workers=workers, chunks=1, microbatches=microbatches)
    except UsageError:
        return False
    return True


def worker_order(
    schedule: Schedule, worker: int, *, workers: int, chunks: int = 1, microbatches: int
) -> list[Action]:
    """The actions of a worker in one iteration.

    Args:
        schedule: which.
        worker: whose, counted from the first stage's.
        workers: of the pipeline. Stage s is on worker s modulo ``workers``.
        chunks: stages per worker.
        microbatches: of an iteration.

    Raises:
        UsageError: if torch would refuse the sizes.
    """
    check_size(schedule, workers=workers, chunks=chunks, microbatches=microbatches)
    turns = _Turns(schedule, worker, workers, chunks, microbatches)
    if schedule is Schedule.ZERO_BUBBLE:
        return list(_zero_bubble(turns))
    return list(_alternating(turns, turns.warm_up))


def in_flight(schedule: Schedule, worker: int, *, workers: int, microbatches: int) -> int:
    """Microbatches whose activations a worker with one stage keeps at the same time, at most.

    A split backward pass keeps them until the weights' gradients are computed.
    """
    behind = workers - 1 - worker
    if schedule is Schedule.ONE_F_ONE_B:
        return min(microbatches, behind + 1)
    if schedule is Schedule.ZERO_BUBBLE:
        return min(microbatches, workers)
    if schedule is Schedule.INTERLEAVED:
        return min(microbatches, 2 * behind + 1)
    return microbatches


def _rounds(workers: int, microbatches: int) -> int:
    """In how many rounds interleaved schedules divide the microbatches."""
    return max(1, microbatches // workers)


@dataclass(frozen=True, slots=True)
class _Turns:
    """Which stage and microbatch the k-th forward and the k-th backward pass of a worker belong to."""

    schedule: Schedule
    worker: int
    workers: int
    chunks: int
    microbatches: int

    @property
    def passes(self) -> int:
        return self.chunks * self.microbatches

    @property
    def per_turn(self) -> int:
        """Microbatches that a stage computes before it is the next stage's turn."""
        if self.schedule in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE):
            return self.microbatches // _rounds(self.workers, self.microbatches)
        return self.microbatches

    @property
    def warm_up(self) -> int:
        """Forward passes before the first pair of forward and backward."""
        behind = self.workers - 1 - self.worker
        first = (self.chunks - 1) * self.per_turn
        if self.schedule in (Schedule.GPIPE, Schedule.LOOPED_BFS):
            return self.passes
        return min(self.passes, first + behind * (2 if self.schedule is Schedule.INTERLEAVED else 1))

    def forward(self, k: int) -> Action:
        chunk, microbatch = self._turn(k)
        return Action(Kind.FORWARD, chunk * self.workers + self.worker, microbatch)

    def backward(self, k: int, kind: Kind = Kind.BACKWARD) -> Action:
        chunk, microbatch = self._turn(k)
        if self.schedule is Schedule.LOOPED_BFS:
            microbatch = self.microbatches - 1 - microbatch
        return Action(kind, (self.chunks - 1 - chunk) * self.workers + self.worker, microbatch)

    def _turn(self, k: int) -> tuple[int, int]:
        turn, inside = divmod(k, self.per_turn)
        cycle, chunk = divmod(turn, self.chunks)
        return chunk, cycle * self.per_turn + inside


def _alternating(turns: _Turns, warm_up: int) -> Iterator[Action]:
    yield from map(turns.forward, range(warm_up))
    for k in range(turns.passes - warm_up):
        yield turns.forward(warm_up + k)
        yield turns.backward(k)
    yield from map(turns.backward, range(turns.passes - warm_up, turns.passes))


def _zero_bubble(turns: _Turns) -> Iterator[Action]:
    """ZB1P: gradients of weights come as many backward passes later as workers precede this one."""
    yield from map(turns.forward, range(turns.warm_up))
    for k in range(turns.passes):
        if turns.warm_up + k < turns.passes:
            yield turns.forward(turns.warm_up + k)
        yield turns.backward(k, Kind.INPUT)
        if k >= turns.worker:
            yield turns.backward(k - turns.worker, Kind.WEIGHT)
    for k in range(max(0, turns.passes - turns.worker), turns.passes):
        yield turns.backward(k, Kind.WEIGHT)
