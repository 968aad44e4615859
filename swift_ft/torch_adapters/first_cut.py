"""The layers of each stage of a LayerStack as a run begins: by a plan, by what they cost, or equally many."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from swift_ft.config.run_plan import RunPlan
from swift_ft.costs.layer_profile import LayerProfile, read_layers
from swift_ft.costs.shared_machines import balanced, balanced_within, relative_layers
from swift_ft.errors import UsageError
from swift_ft.host.memory import most_bytes
from swift_ft.recovery.layout.stage_layers import StageLayers, even_layout
from swift_ft.units import format_bytes

_logger = logging.getLogger(__name__)

Costs = Sequence[float] | Sequence[LayerProfile] | str | os.PathLike[str]
"""Of each layer, in any unit; or as they were measured, in a file or not: then sizes count, too."""

_FOR_LAYERS = 0.7
"""Of a machine's memory. The rest is for libraries, messages, copies for checkpoints, and the script."""


def first_cuts(
    plan: RunPlan | None,
    costs: Costs | None,
    count: int,
    workers_of_stages: Sequence[Sequence[int]],
    *,
    by_memory: bool,
) -> list[StageLayers]:
    """The layers of each stage, by pipeline. All workers call it, and get the same.

    Args:
        plan: says them, if there is one.
        costs: of the layers, if they are known.
        count: layers of the model.
        workers_of_stages: of each pipeline, the rank of each stage's worker.
        by_memory: no stage gets more than its worker has memory for, if that can be.

    Raises:
        UsageError: the costs are not those of so many layers.
    """
    if plan is not None:
        return [pipeline.cut for pipeline in plan.pipelines]
    if costs is None:
        return [even_layout(count, len(workers)) for workers in workers_of_stages]
    layers = _layers(costs)
    if len(layers) != count:
        raise UsageError(f"costs= has {len(layers)} layers, and the LayerStack {count}: give one for each.")
    rooms = _rooms() if by_memory and any(layer.state_bytes for layer in layers) else []
    return [_cut(layers, workers, rooms) for workers in workers_of_stages]


def _layers(costs: Costs) -> tuple[LayerProfile, ...]:
    if isinstance(costs, str | os.PathLike):
        return read_layers(Path(costs))
    if all(isinstance(cost, LayerProfile) for cost in costs):
        return tuple(cast("Sequence[LayerProfile]", costs))
    return relative_layers(cast("Sequence[float]", costs))


def _cut(layers: Sequence[LayerProfile], workers: Sequence[int], rooms: Sequence[int]) -> StageLayers:
    """A pipeline's: the one whose slowest stage is fastest, of those that fit if any does."""
    if rooms:
        room_bytes = [rooms[worker] // workers.count(worker) for worker in workers]
        if (found := balanced_within(layers, room_bytes)) is not None:
            return found
        _say_too_large(layers, room_bytes)
    return balanced(layers, [str(stage) for stage in range(len(workers))])


def _rooms() -> list[int]:
    """Bytes that the layers of each worker may take, by rank; empty if one of them does not know."""
    found: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, _room())
    known = [room for room in found if room is not None]
    return known if len(known) == len(found) else []


def _room() -> int | None:
    """Of what the machine has, not of what is left: a restart, and a next world, have to get the same."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(_FOR_LAYERS * torch.cuda.mem_get_info()[1])
    most, here = most_bytes(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return None if most is None else int(_FOR_LAYERS * most) // here


def _say_too_large(layers: Sequence[LayerProfile], room_bytes: Sequence[int]) -> None:
    if dist.get_rank():
        return
    needed = sum(layer.state_bytes for layer in layers)
    _logger.warning(
        "No cut was found in which all layers fit into the memory of their workers: their state takes %s, "
        "stages have room for %s, and activations come on top. They are cut by their time alone.",
        format_bytes(needed),
        ", ".join(map(format_bytes, room_bytes)),
        extra={"event": "layers_too_large", "needed": needed, "room": [*room_bytes]},
    )
