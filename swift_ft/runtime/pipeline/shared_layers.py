"""Averages and shares of microbatches between the pipelines of a LayerStack that are replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from swift_ft.costs.schedule_orders import Schedule
from swift_ft.data.shares import Change, shares_at
from swift_ft.recovery.layout.stage_layers import StageLayers
from swift_ft.runtime.pipeline.log_interceptor import LogInterceptor
from swift_ft.torch_adapters.layer_stack import LayerStack
from swift_ft.torch_adapters.pipelining.hook import PipelineHook
from swift_ft.torch_adapters.pipelining.layer_averages import LayerAverages
from swift_ft.torch_adapters.pipelining.schedule_order import kind_of
from swift_ft.torch_adapters.process_group import GenerationGroup


class SharedLayers:
    """One worker's part.

    Args:
        stack: has its layers.
        hook: on its schedule and stages.
        interceptor: of their messages, which no worker will ask for again.
        group: makes the group of all workers again in each generation.

    Attributes:
        counts: microbatches of each pipeline in the beginning.
    """

    def __init__(
        self, stack: LayerStack, hook: PipelineHook, interceptor: LogInterceptor, group: GenerationGroup
    ) -> None:
        self._stack = stack
        self._hook = hook
        self._interceptor = interceptor
        self.counts = stack.planned_counts or (hook.microbatches,) * stack.pipelines
        self._changes: Sequence[Change] = ()
        self._averages = LayerAverages(stack, stack.begun, self.counts, scale=hook.scales)
        hook.average(self._averages)
        interceptor.retains = False
        assert dist.group.WORLD is not None
        group.follow(dist.group.WORLD, self._averages.renew)

    @property
    def planned(self) -> tuple[int, ...]:
        """Microbatches of each pipeline, if a plan says it; else empty."""
        return self._stack.planned_counts

    @property
    def has_first_stage(self) -> bool:
        """Whether the pipeline begins on this worker."""
        return 0 in self._stack.stages

    # --------------------------------------------------------------------------------- microbatches

    @property
    def microbatches(self) -> int:
        """Of all pipelines in an iteration."""
        return sum(self.counts)

    @property
    def fewest_microbatches(self) -> int:
        """That torch takes in an iteration, in each pipeline."""
        return (
            max(self._stack.stages_by_pipeline) if kind_of(self._hook.schedule) == Schedule.ONE_F_ONE_B else 1
        )

    @property
    def why_equal_shares(self) -> str:
        """Why all pipelines have equally many microbatches; empty if they need not."""
        if kind_of(self._hook.schedule) not in (Schedule.GPIPE, Schedule.ONE_F_ONE_B):
            return "the order of this schedule is for a number of microbatches that stays"
        return ""

    def follow(self, changes: Sequence[Change]) -> None:
        """Have other numbers of microbatches, each time from an iteration on.

        Args:
            changes: all that there were, the earliest first: of each pipeline.
        """
        self._changes = changes

    def begin(self, iteration: int) -> None:
        """The step of an iteration begins."""
        counts = shares_at(self._changes, iteration) or self.counts
        self._averages.share(counts)
        self._averages.begin(iteration)
        self._hook.have_microbatches(counts[self._stack.pipeline])
        self._interceptor.first_microbatch = self._averages.first

    # ------------------------------------------------------------------------------------- averages

    def place(self, layout: StageLayers) -> None:
        """From now on layers are where a layout of all pipelines puts them."""
        self._averages.place(layout)

    def completes(self, iteration: int) -> bool:
        """Whether an interrupted iteration can be completed without other workers."""
        return self._averages.completes(iteration)

    @property
    def completing(self) -> bool:
        """The next step is the interrupted one, and has the averages of its gradients already."""
        return self._averages.alone

    @completing.setter
    def completing(self, completing: bool) -> None:
        self._averages.alone = completing
