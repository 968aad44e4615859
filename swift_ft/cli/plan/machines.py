"""The machines of a plan's workers, as ``swift-run --plan`` numbers them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, count

from swift_ft.config.run_plan import PlannedPipeline, RunPlan
from swift_ft.errors import UsageError


def machines_of(nodes: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
    """The machine of each worker, by pipeline, and the workers of a machine.

    A node is a machine, if all nodes have equally many workers. Otherwise each worker is a machine, since all
    machines of a run have equally many.

    Args:
        nodes: of each worker of each pipeline, in the order of its stages.
    """
    workers = Counter(chain(*nodes))
    if len(sizes := {*workers.values()}) == 1:
        numbers = {node: number for number, node in enumerate(dict.fromkeys(chain(*nodes)))}
        found = [[numbers[node] for node in own] for own in nodes]
        size = sizes.pop()
        pipelines = tuple(PlannedPipeline((1,) * len(own), machines=tuple(own)) for own in found)
        try:
            RunPlan(pipelines, size).check_order()
        except UsageError:  # its stages go to and fro between nodes
            pass
        else:
            return found, size
    every = count()
    return [[next(every) for _ in own] for own in nodes], 1
