"""The time of an iteration: from the schedule's own order of actions, exactly.

A worker does its actions one after another. A forward pass waits for the output of the stage before, a
backward pass for the gradient of the stage behind, and a transfer takes its time without holding a worker up.
Neighbouring stages of one worker need no transfer. That is all that is assumed, and it is a longest path in
integers. What papers use instead is in ``pipeline_time.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from swift_ft.costs.schedule_orders import Action, Kind, Schedule, check_size, stages_of, worker_order
from swift_ft.errors import UsageError


@dataclass(frozen=True, slots=True)
class StageTime:
    """The cost of a microbatch in a stage.

    Attributes:
        forward_ns: time of the forward pass.
        backward_ns: time of the whole backward pass.
        weight_ns: the part of it that computes the weights' gradients, where a schedule splits it; None for
            half of it.
    """

    forward_ns: int
    backward_ns: int
    weight_ns: int | None = None

    @property
    def compute_ns(self) -> int:
        """Forward and backward."""
        return self.forward_ns + self.backward_ns

    def of(self, kind: Kind) -> int:
        """The time of an action, in nanoseconds."""
        weight = self.backward_ns // 2 if self.weight_ns is None else self.weight_ns
        if kind is Kind.FORWARD:
            return self.forward_ns
        if kind is Kind.BACKWARD:
            return self.backward_ns
        return weight if kind is Kind.WEIGHT else self.backward_ns - weight


@dataclass(frozen=True, slots=True)
class Span:
    """One action, when it is done.

    Attributes:
        action: what is done.
        begin_ns: from the start of the iteration.
        end_ns: likewise.
    """

    action: Action
    begin_ns: int
    end_ns: int


def makespan_ns(
    stages: Sequence[StageTime],
    microbatches: int,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    *,
    workers: int | None = None,
    transfer_ns: int | Sequence[int] = 0,
) -> int:
    """The time of an iteration.

    Args:
        stages: in order.
        microbatches: per iteration.
        schedule: which.
        workers: of the pipeline; one per stage by default.
        transfer_ns: of one message between two workers, or one number per pair of neighbouring stages.

    Returns:
        Nanoseconds from the first forward to the last backward pass.

    Raises:
        UsageError: if torch would refuse the sizes.
    """
    done = spans(stages, microbatches, schedule, workers=workers, transfer_ns=transfer_ns)
    return max(one.end_ns for own in done for one in own)


def spans(
    stages: Sequence[StageTime],
    microbatches: int,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    *,
    workers: int | None = None,
    transfer_ns: int | Sequence[int] = 0,
) -> list[list[Span]]:
    """When each worker does what. The arguments are those of :func:`makespan_ns`.

    Raises:
        UsageError: if torch would refuse the sizes.
    """
    workers = workers or len(stages)
    chunks, over = divmod(len(stages), workers)
    if over:
        raise UsageError(f"{len(stages)} stages cannot be spread evenly over {workers} workers")
    orders = orders_of(schedule, workers, chunks, microbatches)
    borders = len(stages) - 1
    if isinstance(transfer_ns, int):
        of_stage = {
            stage: worker
            for worker in range(workers)
            for stage in stages_of(schedule, worker, workers=workers, chunks=chunks)
        }
        transfers = [transfer_ns if of_stage[k] != of_stage[k + 1] else 0 for k in range(borders)]
    else:
        transfers = list(transfer_ns)
    if len(transfers) != borders:
        raise UsageError(f"{len(transfers)} transfers for {len(stages)} stages: give {borders} or 1")
    return PipelineRun(orders, stages, transfers).carry_out()


@lru_cache(maxsize=8)
def orders_of(
    schedule: Schedule, workers: int, chunks: int, microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """The actions of all workers. Searches ask for the same again and again."""
    return tuple(
        tuple(worker_order(schedule, worker, workers=workers, chunks=chunks, microbatches=microbatches))
        for worker in range(workers)
    )


def one_f_one_b_ns(stages: Sequence[StageTime], microbatches: int, transfer_ns: int = 0) -> int:
    """:func:`makespan_ns` of 1F1B, faster: in each round a stage has one forward and one backward pass.

    In round i, stage k is at microbatch i + S-1-k forward and at i backward. The forward pass waits for the
    stage before, which was there a round earlier, and the backward pass for the stage behind in this round.

    Raises:
        UsageError: if torch would refuse the sizes.
    """
    check_size(Schedule.ONE_F_ONE_B, workers=len(stages), chunks=1, microbatches=microbatches)
    forward, backward = [s.forward_ns for s in stages], [s.backward_ns for s in stages]
    clock, sent = _warmed_up(forward, transfer_ns)
    last = len(stages) - 1
    for i in range(microbatches):
        before = 0
        for k in range(last + 1):
            arrived, before = before, sent[k] + transfer_ns
            if i + last - k < microbatches:
                clock[k] = sent[k] = (clock[k] if clock[k] > arrived else arrived) + forward[k]
        ready = 0
        for k in range(last, -1, -1):
            clock[k] = (clock[k] if clock[k] > ready else ready) + backward[k]
            ready = clock[k] + transfer_ns
    return max(clock)


def _warmed_up(forward: Sequence[int], transfer_ns: int) -> tuple[list[int], list[int]]:
    """When each stage has done its S-1-k first forward passes, and when it had done the last of these."""
    last = len(forward) - 1
    clocks, arrived = [], [0] * last
    for k, one in enumerate(forward):
        clock, ends = 0, []
        for microbatch in range(last - k):
            clock = max(clock, arrived[microbatch]) + one
            ends.append(clock)
        clocks.append(clock)
        arrived = [end + transfer_ns for end in ends]
    return clocks, list(clocks)


class PipelineRun:
    """Carries the orders out: each worker as far as it can, until a message is missing."""

    def __init__(
        self, orders: Sequence[Sequence[Action]], stages: Sequence[StageTime], transfers: Sequence[int]
    ) -> None:
        self._orders = orders
        self._stages = stages
        self._transfers = transfers
        self._arrived: dict[tuple[bool, int, int], int] = {}
        """When a message is there, by whether it goes forward, its receiving stage, and its microbatch."""
        self._waiting: dict[tuple[bool, int, int], int] = {}
        self._done: list[list[Span]] = [[] for _ in orders]
        self._runnable = list(range(len(orders)))[::-1]

    def carry_out(self) -> list[list[Span]]:
        """When each worker does what.

        Raises:
            UsageError: the orders wait for each other.
        """
        while self._runnable:
            self._advance(self._runnable.pop())
        if any(len(done) < len(order) for done, order in zip(self._done, self._orders, strict=True)):
            raise UsageError("the schedule's order never ends: workers wait for each other")
        return self._done

    def _advance(self, worker: int) -> None:
        done, order = self._done[worker], self._orders[worker]
        clock = done[-1].end_ns if done else 0
        for action in order[len(done) :]:
            needed = self._needed(action)
            if needed is not None and needed not in self._arrived:
                self._waiting[needed] = worker
                return
            begin = clock if needed is None else max(clock, self._arrived[needed])
            clock = self._do(worker, action, begin)

    def _do(self, worker: int, action: Action, begin: int) -> int:
        """Do an action, and return when it is done."""
        end = begin + self._stages[action.stage].of(action.kind)
        self._done[worker].append(Span(action, begin, end))
        self._send(action, end)
        return end

    def _needed(self, action: Action) -> tuple[bool, int, int] | None:
        """The message that an action waits for."""
        if action.kind is Kind.FORWARD:
            return (True, action.stage, action.microbatch) if action.stage else None
        if action.kind is Kind.WEIGHT or action.stage == len(self._stages) - 1:
            return None  # its own worker has done before what it needs
        return (False, action.stage, action.microbatch)

    def _send(self, action: Action, now: int) -> None:
        if action.kind is Kind.WEIGHT:
            return
        forward = action.kind is Kind.FORWARD
        receiver = action.stage + (1 if forward else -1)
        if not 0 <= receiver < len(self._stages):
            return
        message = (forward, receiver, action.microbatch)
        self._arrived[message] = now + self._transfers[min(action.stage, receiver)]
        if message in self._waiting:
            self._runnable.append(self._waiting.pop(message))
