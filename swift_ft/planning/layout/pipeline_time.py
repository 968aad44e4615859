"""The time of a pipeline by its number of microbatches: exact, a lower bound, and what papers estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swift_ft.costs.schedule_orders import Schedule, is_allowed, stages_of
from swift_ft.planning.layout.costs import StageCosts
from swift_ft.planning.layout.makespan import StageTime, makespan_ns, one_f_one_b_ns
from swift_ft.planning.layout.pipeline_template import Template


@dataclass(slots=True)
class PipelineTime:
    """The time of a template's pipeline by its number of microbatches.

    Attributes:
        stages: their times.
        schedule: which.
        transfer_ns: of one message between two workers.
        stages_per_worker: how many.
    """

    stages: tuple[StageTime, ...]
    schedule: Schedule = Schedule.ONE_F_ONE_B
    transfer_ns: int = 0
    stages_per_worker: int = 1
    _exact: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, costs: StageCosts, template: Template, schedule: Schedule, transfer_ns: int = 0
    ) -> PipelineTime:
        """The time of a template."""
        stages = tuple(costs.time(*stage) for stage in template.stages)
        return cls(stages, schedule, transfer_ns, template.stages_per_worker)

    @property
    def workers(self) -> int:
        """Of the pipeline."""
        return len(self.stages) // self.stages_per_worker

    @property
    def least(self) -> int:
        """Microbatches that the schedule demands: one per stage, or one."""
        demanding = (Schedule.ONE_F_ONE_B, Schedule.DUAL_PIPE_V)
        return len(self.stages) if self.schedule in demanding else 1

    def counts(self, most: int) -> list[int]:
        """All numbers of microbatches that the schedule takes, up to ``most``."""
        sizes = {"workers": self.workers, "chunks": self.stages_per_worker}
        return [n for n in range(1, most + 1) if is_allowed(self.schedule, microbatches=n, **sizes)]

    def exact(self, microbatches: int) -> int:
        """The exact makespan."""
        if microbatches not in self._exact:
            self._exact[microbatches] = (
                one_f_one_b_ns(self.stages, microbatches, self.transfer_ns)
                if self.schedule is Schedule.ONE_F_ONE_B
                else makespan_ns(
                    self.stages,
                    microbatches,
                    self.schedule,
                    workers=self.workers,
                    transfer_ns=self.transfer_ns,
                )
            )
        return self._exact[microbatches]

    def bound(self, microbatches: int) -> int:
        """A lower bound that is found faster."""
        if self.schedule is Schedule.ONE_F_ONE_B:
            return lower_bound_ns(self.stages, microbatches, self.transfer_ns)
        return microbatches * self._busiest_ns()

    def _busiest_ns(self) -> int:
        """A microbatch's time on the worker that computes longest."""
        chunks, workers = self.stages_per_worker, self.workers
        placed = (stages_of(self.schedule, w, workers=workers, chunks=chunks) for w in range(workers))
        return max(sum(self.stages[stage].compute_ns for stage in own) for own in placed)

    def bound_within(self, time_ns: int, most: int) -> int:
        """Microbatches, ``most`` at most, that the bound allows within a time; 0 if not :attr:`least`."""
        if self.bound(self.least) > time_ns:
            return 0
        low, high = self.least, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bound(middle) <= time_ns else (low, middle)
        return low

    def exact_within(self, time_ns: int, most: int) -> int:
        """As :meth:`bound_within`, exactly."""
        high = self.bound_within(time_ns, most)
        if not high or self.exact(self.least) > time_ns:
            return 0
        low, step = high, 1
        while low > self.least and self.exact(low) > time_ns:  # the bound is nearly exact: begin there
            high, low, step = low, max(self.least, low - step), 2 * step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.exact(middle) <= time_ns else (low, middle)
        return low


# The estimates that papers use instead of the exact makespan, and a lower bound that is nearly it.
#
# Oobleck's equations 1 to 4 and AutoHet's equation 1 are sums over stages. Neither is a bound of the time
# under 1F1B: Oobleck's is too small where an early stage is far slower than others, AutoHet's too large where
# it is slower at all. ``compare`` of ``swift-plan`` shows both beside the exact time.


def oobleck_ns(stages: Sequence[StageTime], microbatches: int) -> int:
    """Oobleck (SOSP '23), equations 1 to 4, with all stages' times in T1 and T3.

    T1 = sum of w. T2 = (N - S + k - 1) w_k, and T3 = sum of w from k on, with w the time of a stage, forward
    and backward, k the slowest stage and N the number of microbatches. (As printed, the right half of a
    division begins one layer late.)
    """
    times = [stage.compute_ns for stage in stages]
    slowest = times.index(max(times))
    middle = (microbatches - len(times) + slowest - 1) * times[slowest]
    return sum(times) + middle + sum(times[slowest:])


def autohet_ns(stages: Sequence[StageTime], microbatches: int) -> int:
    """AutoHet (arXiv 2512.20953), equation 1 of one pipeline, without the gradients' synchronisation.

    The sum of all stages' times, and the slowest one's for each further microbatch.
    """
    times = [stage.compute_ns for stage in stages]
    return sum(times) + (microbatches - 1) * max(times)


def lower_bound_ns(stages: Sequence[StageTime], microbatches: int, transfer_ns: int = 0) -> int:
    """A lower bound of the time under 1F1B, mostly equal to it.

    Stage k computes N w_k. Before its first pass come the forward passes of the stages before it, and after
    its last one their backward passes: A = the sum of w before k. Between its first forward and backward pass
    lies R = the sum of w behind k, of which it fills no more than the S-1-k forward passes that its order has
    there. Between its last forward and backward pass lies R again, and it fills S-1-k backward passes. Where
    these two gaps are apart,

        A + N w_k + max(0, R - (S-1-k) f_k) + max(0, R - (S-1-k) b_k)

    of any stage is a bound. With both gaps positive it is the sum of Oobleck's T1, T2 and T3.
    """
    behind, bound = 0, 0
    for j, stage in enumerate(reversed(stages)):  # j stages behind it
        ahead = 2 * transfer_ns if j else 0
        behind += ahead
        bound = max(bound + ahead + stage.compute_ns, own_bound_ns(stage, behind, j, microbatches))
        behind += stage.compute_ns
    return bound


def own_bound_ns(stage: StageTime, behind_ns: int, stages_behind: int, microbatches: int) -> int:
    """The bound of :func:`lower_bound_ns` for one stage, without the stages before it."""
    first = max(0, behind_ns - stages_behind * stage.forward_ns)
    last = max(0, behind_ns - stages_behind * stage.backward_ns)
    gaps = first + last if microbatches > stages_behind + 1 else max(first, last)
    return microbatches * stage.compute_ns + gaps
