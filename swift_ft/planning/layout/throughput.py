"""Throughput of a job on each number of nodes, by templates (Oobleck §4). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.costs.schedule_orders import Schedule
from swift_ft.errors import UsageError
from swift_ft.planning.layout.costs import StageCosts
from swift_ft.planning.layout.instantiate import best_instantiation
from swift_ft.planning.layout.pipeline_template import TemplateOptions
from swift_ft.planning.layout.pipeline_time import PipelineTime
from swift_ft.planning.layout.templates import node_counts, templates_for


def iteration_by_nodes(
    layers: Sequence[LayerProfile], nodes: int, *, min_nodes: int, tolerate: int, microbatches: int
) -> dict[int, int]:
    """Nanoseconds of an iteration on each number of nodes that can hold the model, one device per node.

    The templates are those of the largest number of nodes. A number that cannot hold ``tolerate + 1``
    pipelines goes on with as many as it can; Oobleck would stop.

    Args:
        nodes: the largest number.
        min_nodes: per pipeline.
        tolerate: losses at once that leave a copy of every layer, while there are nodes enough.
        microbatches: over all pipelines together.

    Raises:
        UsageError: if not even the largest number of nodes can train.
    """
    costs, options = StageCosts(layers), TemplateOptions(schedule=Schedule.ONE_F_ONE_B)
    counts = node_counts(nodes, 0, min_nodes, len(layers))
    times = {
        template.nodes: PipelineTime.of(costs, template, options.schedule)
        for template in templates_for(costs, counts, options)
    }
    found = {}
    for count in range(min_nodes, nodes + 1):
        fewest = min(tolerate, count // min_nodes - 1) + 1
        try:
            found[count] = best_instantiation(times, count, fewest, microbatches).iteration_ns
        except UsageError:
            if count == nodes:
                raise
    return found
