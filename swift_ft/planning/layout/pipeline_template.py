"""A pipeline template: the stages of a pipeline of some nodes, with their time (Oobleck, SOSP '23, §4.1)."""

from __future__ import annotations

from dataclasses import dataclass

from swift_ft.costs.schedule_orders import Schedule, check_size
from swift_ft.planning.layout.search import Stage

PER_WORKER = 4
"""Microbatches per worker while templates are made: the bubble is small then, says the paper."""


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """The options of templates.

    Attributes:
        microbatches: of an iteration; None for :data:`PER_WORKER` per worker.
        schedule: which.
        transfer_ns: of one message between two workers.
        stages_per_worker: as many as the schedule takes at least where none are given: 2 for those that loop
            or turn, else 1.

    Raises:
        UsageError: if the schedule takes another number of stages per worker.
    """

    microbatches: int | None = None
    schedule: Schedule = Schedule.ONE_F_ONE_B
    transfer_ns: int = 0
    stages_per_worker: int = 0

    def __post_init__(self) -> None:
        if not self.stages_per_worker:
            object.__setattr__(self, "stages_per_worker", self.schedule.least_chunks)
        if self.schedule.is_single or self.schedule.is_v:
            check_size(self.schedule, workers=1, chunks=self.stages_per_worker, microbatches=2)


@dataclass(frozen=True, slots=True)
class Template:
    """The stages of a pipeline of some nodes.

    Attributes:
        nodes: of the pipeline. Stages fill them in order.
        stages: layers and devices of each.
        microbatches: for which it was made.
        iteration_ns: its exact makespan with them.
        bound_ns: no cut has a smaller one.
        stages_per_worker: :func:`~swift_ft.costs.schedule_orders.stages_of` says which each has.
    """

    nodes: int
    stages: tuple[Stage, ...]
    microbatches: int
    iteration_ns: int
    bound_ns: int
    stages_per_worker: int = 1

    @property
    def workers(self) -> int:
        """Of the pipeline."""
        return len(self.stages) // self.stages_per_worker

    @property
    def proven(self) -> bool:
        """Whether no cut is better."""
        return self.bound_ns >= self.iteration_ns

    @property
    def gap(self) -> float:
        """The largest gain that another cut can bring, as a share of this one's time."""
        return 1 - self.bound_ns / self.iteration_ns
