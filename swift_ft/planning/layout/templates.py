"""Pipeline templates: for each number of nodes the best cut of a model into stages (Oobleck, SOSP '23, §4.1).

The cost of a cut is its exact makespan, not the sums of the paper.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from swift_ft.errors import UsageError
from swift_ft.planning.layout.costs import StageCosts
from swift_ft.planning.layout.misfit import least_nodes
from swift_ft.planning.layout.multi_stage import best_multi_stage
from swift_ft.planning.layout.pipeline_template import Template, TemplateOptions
from swift_ft.planning.layout.single_stage import best_single_stage


def node_counts(nodes: int, tolerate: int, min_nodes: int, layers: int) -> range:
    """Numbers of nodes for which templates are made (Oobleck §4.1.1).

    All from ``min_nodes`` to what is left when ``tolerate`` other pipelines have ``min_nodes`` each, and no
    more nodes than layers. So each number of nodes that holds ``tolerate + 1`` pipelines can be used up.

    Raises:
        UsageError: if there are not nodes enough.
    """
    if min_nodes < 1 or tolerate < 0:
        raise UsageError(
            f"{min_nodes} nodes at least and {tolerate} losses: give at least 1 node and at least 0 losses"
        )
    needed = (tolerate + 1) * min_nodes
    if nodes < needed:
        fewer = f", or --tolerate {nodes // min_nodes - 1}" if nodes >= min_nodes else ""
        raise UsageError(
            f"{nodes} nodes cannot hold {tolerate + 1} pipelines of {min_nodes} nodes: {needed - nodes} more "
            f"nodes would do{fewer}"
        )
    if min_nodes > layers:
        raise UsageError(f"{layers} layers make no more than {layers} stages: --min-nodes {layers} would do")
    return range(min_nodes, min(nodes - tolerate * min_nodes, layers) + 1)


def templates_for(
    costs: StageCosts, counts: Sequence[int], options: TemplateOptions | None = None
) -> tuple[Template, ...]:
    """The best template for each number of nodes.

    Args:
        counts: of nodes, ascending.
        options: how.

    Raises:
        UsageError: if no cut fits one of them; the message says why not, and what would do.
    """
    return tuple(best_template(costs, nodes, options) for nodes in counts)


def smallest_pipeline(costs: StageCosts, nodes: int, options: TemplateOptions) -> int:
    """The smallest number of nodes that holds the model.

    Args:
        nodes: that are there.
        options: how templates are made.

    Raises:
        UsageError: if all of them do not hold it.
    """
    if options.stages_per_worker == 1:
        return least_nodes(costs, nodes, options.microbatches, options.schedule)
    for count in range(1, nodes):
        with contextlib.suppress(UsageError):
            return best_multi_stage(costs, count, options).nodes
    return best_multi_stage(costs, nodes, options).nodes


def best_template(costs: StageCosts, nodes: int, options: TemplateOptions | None = None) -> Template:
    """The best template for a number of nodes, over all numbers of stages.

    Raises:
        UsageError: if no cut fits; the message says why not, and what would do.
    """
    options = options or TemplateOptions()
    best = best_single_stage if options.stages_per_worker == 1 else best_multi_stage
    return best(costs, nodes, options)
