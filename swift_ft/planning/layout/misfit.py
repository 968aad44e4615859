"""The reason why no cut fits: the constraint, by how much it is missed, and what would make it fit."""

from __future__ import annotations

from swift_ft.costs.schedule_orders import Schedule, check_size
from swift_ft.errors import UsageError
from swift_ft.planning.layout.costs import StageCosts
from swift_ft.units import format_bytes


def why_not(costs: StageCosts, nodes: int, microbatches: int | None, schedule: Schedule) -> str:
    """What keeps a model from being cut for some nodes, in one line.

    Raises:
        UsageError: if it is the schedule; the message is of the same kind.
    """
    if nodes < 1:
        return f"{nodes} nodes cannot hold a pipeline: --nodes must be at least 1"
    per_node, layers = costs.devices_per_node, len(costs.layers)
    fewest = nodes * per_node.bit_count()
    if layers < fewest:
        enough = layers // per_node.bit_count()
        return (
            f"{layers} layers cannot use {nodes} nodes of {per_node} devices: they need at least {fewest} "
            f"stages, {fewest - layers} more than layers; "
            + (
                f"{enough} nodes would do"
                if enough
                else f"1 node of {1 << per_node.bit_length() - 1} devices would do"
            )
        )
    if microbatches is not None and schedule is not Schedule.ONE_F_ONE_B:
        check_size(schedule, workers=fewest, chunks=1, microbatches=microbatches)
    elif microbatches is not None and microbatches < fewest:
        return (
            f"{schedule} needs as many microbatches as stages: {microbatches} are {fewest - microbatches} "
            f"too few for {nodes} nodes; --microbatches {fewest} would do"
        )
    needed = least_memory(costs, nodes, microbatches, schedule)
    given = costs.memory_bytes or 0
    return (
        f"no cut fits into the memory of {nodes} nodes: {format_bytes(given)} per device are "
        f"{format_bytes(needed - given)} too few; --memory {needed} would do, or more nodes (--min-nodes)"
    )


def least_memory(costs: StageCosts, nodes: int, microbatches: int | None, schedule: Schedule) -> int:
    """Bytes per device with which some cut fits, of those that give each stage one node's devices.

    Found by bisection: whether the layers can be cut, from the last one, into stages that fit.
    """
    from_last = _sizes(costs, nodes, microbatches, schedule)
    low, high = 0, max(stage.bytes(0, len(costs.layers)) for stage in from_last)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _can_cut(from_last, len(costs.layers), middle) else (middle, high)
    return high


def least_nodes(costs: StageCosts, nodes: int, microbatches: int | None, schedule: Schedule) -> int:
    """The smallest number of nodes that holds the model, one stage each.

    Args:
        nodes: that are there.
        microbatches: of an iteration; None for four per stage.
        schedule: which.

    Raises:
        UsageError: if all of them do not hold it.
    """
    most = min(nodes, len(costs.layers))
    for count in range(1, most + 1):
        stages = _sizes(costs, count, microbatches, schedule)
        if costs.memory_bytes is None or _can_cut(stages, len(costs.layers), costs.memory_bytes):
            return count
    raise UsageError(why_not(costs, most, microbatches, schedule))


def _sizes(costs: StageCosts, nodes: int, microbatches: int | None, schedule: Schedule) -> list[_Size]:
    return [_Size(costs, nodes, microbatches, schedule, behind) for behind in range(nodes)]


class _Size:
    """The memory of the stage with so many others behind it."""

    def __init__(
        self, costs: StageCosts, nodes: int, microbatches: int | None, schedule: Schedule, behind: int
    ) -> None:
        self._costs = costs
        self._devices = 1 << (costs.devices_per_node.bit_length() - 1)
        self._kept = costs.kept(schedule, behind, nodes, microbatches or 4 * nodes)

    def bytes(self, first: int, end: int) -> int:
        return self._costs.memory(first, end, self._devices, self._kept)


def _can_cut(stages: list[_Size], layers: int, memory_bytes: int) -> bool:
    ends = {layers}
    for behind, stage in enumerate(stages):
        left = len(stages) - 1 - behind
        ends = {
            first for end in ends for first in range(left, end) if stage.bytes(first, end) <= memory_bytes
        }
    return 0 in ends
