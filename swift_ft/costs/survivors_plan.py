"""The plan of pipelines that follow a loss: layers of each stage, microbatches of each pipeline. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from swift_ft.config.run_plan import PlannedPipeline, RunPlan
from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.costs.shared_machines import parts, relative_layers, share_microbatches, worth_moving_to
from swift_ft.recovery.layout.stage_layers import even_layout
from swift_ft.recovery.next_pipelines import Sizes


def plan_after_loss(
    pipelines: Sequence[int],
    sizes: Sizes,
    layers: Sequence[LayerProfile] | None = None,
    *,
    unlike: bool,
) -> RunPlan:
    """Deal layers and microbatches so that the slowest stage and the slowest pipeline are as fast as can be.

    Args:
        pipelines: the number of stages of each.
        sizes: what there is to deal.
        layers: what each costs; None if that is unknown: all count alike.
        unlike: pipelines may have unlike numbers of microbatches.
    """
    costs = relative_layers([1.0] * sizes.layers) if layers is None else layers
    cuts = [
        worth_moving_to(costs, [str(stage) for stage in range(stages)], even_layout(sizes.layers, stages))
        for stages in pipelines
    ]
    if not sizes.microbatches:
        return RunPlan(tuple(PlannedPipeline(cut) for cut in cuts))
    if not unlike:
        equal = sizes.microbatches // len(cuts)
        return RunPlan(tuple(PlannedPipeline(cut, equal) for cut in cuts))
    loads = [[sum(layer.compute_ns for layer in part) for part in parts(costs, cut)] for cut in cuts]
    # 1F1B takes no fewer microbatches than a pipeline has stages; other schedules take any number.
    fewest = max(pipelines) if max(pipelines) * len(pipelines) <= sizes.microbatches else 1
    counts = share_microbatches(loads, sizes.microbatches, fewest)
    return RunPlan(tuple(map(PlannedPipeline, cuts, counts)))
