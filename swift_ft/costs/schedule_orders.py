"""In which order torch's schedules compute on each worker of a pipeline.

``torch.distributed.pipelining.schedules`` computes the same orders; a test compares them for many sizes. They
are computed here as well because planning knows nothing of torch.

All schedules are one pattern: some forward passes to warm up, then one forward and one backward pass in turn,
then the backward passes that are left. They differ in the number of warm-up passes (GPipe and LoopedBFS warm
up with all), in which stage's turn it is, and in whether the backward pass is split into inputs and weights.
The V schedules (ZBV and DualPipeV) are lists of phases instead: a worker has one stage on the way down and
one on the way back, and the last worker hands its output to itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from swift_ft.errors import UsageError


class Schedule(StrEnum):
    """A schedule of torch that can be planned for."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    LOOPED_BFS = "looped-bfs"
    INTERLEAVED = "interleaved-1f1b"
    ZERO_BUBBLE = "zero-bubble"
    ZBV = "zbv"
    DUAL_PIPE_V = "dualpipev"

    @property
    def is_single(self) -> bool:
        """Whether torch allows one stage per worker only."""
        return self in (Schedule.GPIPE, Schedule.ONE_F_ONE_B)

    @property
    def is_v(self) -> bool:
        """Whether stages are placed as a V: worker w of W has stages w and 2W-1-w."""
        return self in (Schedule.ZBV, Schedule.DUAL_PIPE_V)

    @property
    def least_chunks(self) -> int:
        """Stages per worker with which it is what it is: 2 if it loops or turns."""
        return 1 if self.is_single or self is Schedule.ZERO_BUBBLE else 2

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights may be computed after those of inputs."""
        return self.is_v or self is Schedule.ZERO_BUBBLE


class Kind(StrEnum):
    """The kind of computation of an action."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward pass."""
    INPUT = "I"
    """The backward pass for the inputs' gradients only."""
    WEIGHT = "W"
    """The rest of the backward pass, after :attr:`INPUT`: the weights' gradients."""


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
        chunks: stages per worker.
        microbatches: per iteration.

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
    if schedule.is_v and chunks != 2:
        raise UsageError(
            f"{schedule} takes 2 stages per worker, not {chunks}: "
            f"{2 * workers} stages on {workers} workers would do"
        )
    if schedule is Schedule.DUAL_PIPE_V and microbatches < 2 * workers:
        raise UsageError(
            f"{schedule} needs at least as many microbatches as stages: {microbatches} are "
            f"{2 * workers - microbatches} too few for {2 * workers} stages; {2 * workers} would do"
        )
    if schedule is Schedule.ONE_F_ONE_B and microbatches < workers:
        raise UsageError(
            f"{schedule} needs at least as many microbatches as stages: {microbatches} are "
            f"{workers - microbatches} too few for {workers} stages; {workers} would do"
        )
    if schedule in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE):
        rounds = _rounds(workers, microbatches)
        over = microbatches % rounds
        if over:
            raise UsageError(
                f"{schedule} with {workers} workers divides {microbatches} microbatches into {rounds} "
                f"rounds, and {over} are over: {microbatches - over} would do"
            )


def is_allowed(schedule: Schedule, *, workers: int, microbatches: int, chunks: int = 1) -> bool:
    """Whether torch takes a schedule of such a size."""
    try:
        check_size(schedule, workers=workers, chunks=chunks, microbatches=microbatches)
    except UsageError:
        return False
    return True


def stages_of(schedule: Schedule, worker: int, *, workers: int, chunks: int) -> list[int]:
    """The stages that torch places on a worker, ascending: every ``workers``-th, or both arms of the V."""
    if schedule.is_v:
        return [worker, 2 * workers - 1 - worker]
    return [chunk * workers + worker for chunk in range(chunks)]


def worker_order(
    schedule: Schedule, worker: int, *, workers: int, chunks: int = 1, microbatches: int
) -> list[Action]:
    """The actions of a worker in one iteration.

    Args:
        schedule: which.
        worker: whose, counted from the first stage's.
        workers: of the pipeline. :func:`stages_of` says which stages each has.
        chunks: stages per worker.
        microbatches: per iteration.

    Raises:
        UsageError: if torch would refuse the sizes.
    """
    check_size(schedule, workers=workers, chunks=chunks, microbatches=microbatches)
    if schedule.is_v:
        return _v_order(schedule, worker, workers, microbatches)
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


def most_kept(
    schedule: Schedule, worker: int, *, workers: int, chunks: int, microbatches: int
) -> list[tuple[int, ...]]:
    """The microbatches that a worker with several stages keeps at the same time, by its stages, ascending.

    Those moments to which no other has more of all stages: memory is largest in one of them.

    Args:
        schedule: which.
        worker: whose.
        chunks: stages per worker.
        microbatches: per iteration.
    """
    place = {s: k for k, s in enumerate(stages_of(schedule, worker, workers=workers, chunks=chunks))}
    kept, moments = [0] * chunks, set[tuple[int, ...]]()
    for action in worker_order(schedule, worker, workers=workers, chunks=chunks, microbatches=microbatches):
        if action.kind is Kind.FORWARD:
            kept[place[action.stage]] += 1
        elif action.kind is not Kind.INPUT:
            moments.add(tuple(kept))
            kept[place[action.stage]] -= 1
    return [one for one in sorted(moments) if not any(_covers(other, one) for other in moments)]


def _covers(more: tuple[int, ...], less: tuple[int, ...]) -> bool:
    return more != less and all(a >= b for a, b in zip(more, less, strict=True))


def _rounds(workers: int, microbatches: int) -> int:
    """In how many rounds interleaved schedules divide the microbatches."""
    return max(1, microbatches // workers)


@dataclass(frozen=True, slots=True)
class _Turns:
    """The stage and the microbatch that the k-th forward and the k-th backward pass of a worker belong to."""

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


def _v_order(schedule: Schedule, worker: int, workers: int, microbatches: int) -> list[Action]:
    """A worker's actions under a V schedule.

    ZBV's pattern fills the pipeline only from 2W-1 microbatches on; torch makes it for as many at least, and
    leaves out the actions of those that are not there.
    """
    tape = _Tape(stages_of(schedule, worker, workers=workers, chunks=2))
    if schedule is Schedule.ZBV:
        _zbv(tape, worker, workers, max(2 * workers - 1, microbatches))
    else:
        _dual_pipe_v(tape, worker, workers, microbatches)
    return [action for action in tape.actions if action.microbatch < microbatches]


def _zbv(tape: _Tape, worker: int, workers: int, microbatches: int) -> None:
    """ZB-V (Qi et al., "Zero Bubble Pipeline Parallelism", §6), as torch lays it out."""
    behind = workers - 1 - worker
    tape.repeat("F0", 2 * behind + 1)
    tape.repeat("F1 F0", worker)
    tape.repeat("F1 I1 W1", behind + 1)
    tape.repeat("F0 I0 W0 F1 I1 W1", microbatches - 2 * workers + 1 + worker)
    tape.repeat("I0 W0 F1 I1 W1", behind)
    tape.repeat("I0 I1", worker)
    tape.repeat("I0 W0", behind + 1)
    tape.repeat("W1", worker)
    tape.repeat("W0", worker)


def _dual_pipe_v(tape: _Tape, worker: int, workers: int, microbatches: int) -> None:
    """DualPipeV (DeepSeek), as torch lays it out: of passes that overlap, the forward one first."""
    behind = workers - 1 - worker
    tape.repeat("F0", 2 * behind)
    tape.repeat("F0 F1", worker + 1)
    tape.repeat("I1 W F1", behind)
    tape.repeat("F0 B1 F1 B0", microbatches - 2 * workers + worker + 1)
    tape.repeat("B1 F1 B0", behind)
    for k in range(2 * (worker + 1)):  # the first half of these backward passes is whole, the second is split
        tape.repeat(f"{'B' if k <= worker else 'I'}{1 - k % 2}", 1)
    tape.repeat("W I0", behind)
    tape.repeat("W", worker + 1)


class _Tape:
    """Writes down actions; each one takes the next microbatch of its kind and stage."""

    def __init__(self, stages: Sequence[int]) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._forward = [0, 0]
        self._backward = [0, 0]
        self._split: list[tuple[int, int]] = []
        """Arm and microbatch of the weights' gradients that are left, the oldest first."""

    def repeat(self, phase: str, times: int) -> None:
        """Do a phase some times: F0 is the forward pass of the first stage, W1 the weights of the second.

        W alone computes the oldest weights' gradients that are left, of either stage.
        """
        for step in phase.split() * times:
            self._do(Kind(step[0]), int(step[1]) if len(step) > 1 else None)

    def _do(self, kind: Kind, arm: int | None) -> None:
        if kind is Kind.WEIGHT:
            taken = next(one for one in self._split if arm is None or one[0] == arm)
            self._split.remove(taken)
            self.actions.append(Action(kind, self._stages[taken[0]], taken[1]))
            return
        assert arm is not None, "only the weights' gradients have a queue"
        counts = self._forward if kind is Kind.FORWARD else self._backward
        self.actions.append(Action(kind, self._stages[arm], counts[arm]))
        if kind is Kind.INPUT:
            self._split.append((arm, counts[arm]))
        counts[arm] += 1
