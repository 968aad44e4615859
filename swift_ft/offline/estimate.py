"""Estimates of how long a recovery would take: each part with its source, measured or assumed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from swift_ft.costs.job import Job, Measured, Worker
from swift_ft.planning.costs import Costs, Movements, times
from swift_ft.recovery.plan import Plan
from swift_ft.recovery.recoveries import Recovery


@dataclass(frozen=True, slots=True)
class EstimatedPart:
    """One part of a recovery.

    Attributes:
        what: is done.
        seconds: that it takes; None if nothing tells.
        source: where the seconds come from: what was measured, and what is assumed.
    """

    what: str
    seconds: float | None
    source: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time of a recovery, until all workers are back where they were.

    Attributes:
        parts: one after the other.
        seconds: of all parts that are known.
        complete: all parts are known. Otherwise it takes at least these seconds.
    """

    parts: tuple[EstimatedPart, ...]
    seconds: float
    complete: bool


class RunCosts:
    """The measurements of a run, for estimates.

    Args:
        profiles: what its workers measured in their first iterations, by rank; some may be missing.
        world_size: the number of its workers.
        per_machine: workers on each machine.
        past: recoveries of the run.
        between_checkpoints_s: seconds of an iteration by the times of its checkpoints; None if unknown.
    """

    def __init__(
        self,
        profiles: Mapping[int, Worker],
        *,
        world_size: int,
        per_machine: int,
        past: Sequence[Recovery],
        between_checkpoints_s: float | None,
    ) -> None:
        unmeasured = Worker(holds=(), measured=Measured())
        workers = tuple(profiles.get(rank, unmeasured) for rank in range(world_size))
        self._costs = Costs(Job(workers, per_machine, checkpoint_interval=1))
        self._past = [one for one in past if one.reported is not None]
        self._iteration_s, self._iteration_source = self._costs.iteration_s, "measured: its first iterations"
        if between_checkpoints_s is not None:
            self._iteration_s = between_checkpoints_s
            self._iteration_source = "measured: the times of its checkpoints"

    def estimate(self, plan: Plan, *, repeats: int) -> Estimate:
        """The time of a plan.

        Args:
            repeats: completed iterations that are trained again.
        """
        parts = tuple(self._parts(plan, repeats))
        known = [part.seconds for part in parts if part.seconds is not None]
        return Estimate(parts, sum(known), complete=len(known) == len(parts))

    def _parts(self, plan: Plan, repeats: int) -> Iterator[EstimatedPart]:
        yield EstimatedPart(
            "finding the loss",
            0.0,
            "assumed: a process that dies is seen at once; a machine that falls silent, after the time of "
            "--heartbeat-timeout",
        )
        yield self._replacing()
        moved = Movements.of(plan)
        if moved.loading:
            source = "measured: the state and the writing of checkpoints; assumed: reading is as fast"
            yield _part("loading the checkpoint", self._costs.load_s(moved.loading), source)
        source = "measured: the state, and the link between machines at the start"
        if moved.receiving:
            yield _part("receiving the state from replicas", self._costs.transfer_s(moved.receiving), source)
        if moved.fetching:
            what = "getting the lost state from the memory of another machine"
            yield _part(what, self._costs.transfer_s(moved.fetching), source)
        replays = max(
            (task.replay_until - task.begin for task in plan.tasks.values() if task.replays), default=0
        )
        if replays:
            yield self._replaying(plan, replays)
        if repeats:
            what = f"training {_iterations(repeats)} again"
            yield _part(what, times(repeats, self._iteration_s), self._iteration_source)

    def _replacing(self) -> EstimatedPart:
        what = "replacing the machine, and leaving the old groups"
        taken = [one.reported - one.detected for one in self._past if one.reported is not None]
        if not taken:
            return EstimatedPart(what, None, "unknown: this run has had no recovery to measure")
        count = "its recovery" if len(taken) == 1 else f"its {len(taken)} recoveries"
        return EstimatedPart(what, median(taken), f"measured: {count}")

    def _replaying(self, plan: Plan, replays: int) -> EstimatedPart:
        what = f"replaying {_iterations(replays)}"
        computing = times(replays, self._costs.replay_s(plan.tasks))
        if computing is None:
            return _part(what, times(replays, self._iteration_s), f"{self._iteration_source}, with its waits")
        helped = "; assumed: helpers save nothing" if plan.parallel_replays else ""
        return _part(what, computing, f"measured: computing in its first iterations{helped}")


def _iterations(count: int) -> str:
    return f"{count} iteration{'s' * (count != 1)}"


def _part(what: str, seconds: float | None, source: str) -> EstimatedPart:
    return EstimatedPart(
        what, seconds, source if seconds is not None else "unknown: the run has not measured it"
    )
