"""Which layers of a :class:`swift_ft.LayerStack` are on which stage, and what moves when that changes. Pure.

A layout here is the number of layers of each stage, in the pipeline's order: ``(3, 2, 3)``. The stages and
their workers stay the same. A machine that runs the workers of another one, too, gets fewer layers for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple

from swift_ft.recovery.events import StatusReported

__all__ = [
    "LayerMove",
    "StageLayers",
    "even_layout",
    "layers_by_rank",
    "layers_of",
    "moves_between",
    "present_layout",
    "stages_in",
    "why_no_layout",
]

StageLayers = tuple[int, ...]
"""The number of layers of each stage."""


class LayerMove(NamedTuple):
    """Layers that go from one worker to another.

    Attributes:
        source: the rank that has them.
        target: the rank that gets them.
        layers: their indices, in ascending order.
    """

    source: int
    target: int
    layers: tuple[int, ...]


def even_layout(layers: int, stages: int) -> StageLayers:
    """As even as possible. If one more is left, a later stage has it: it keeps fewer activations."""
    ends = [layers * stage // stages for stage in range(stages + 1)]
    return tuple(end - first for first, end in pairwise(ends))


def layers_of(layout: StageLayers, stage: int) -> range:
    """The layers of a stage."""
    first = sum(layout[:stage])
    return range(first, first + layout[stage])


def why_no_layout(layout: StageLayers, layers: int, stages: int) -> str:
    """Why a layout cannot be; empty if it can."""
    if not layers:
        return "the model is no LayerStack"
    if len(layout) != stages:
        return f"it has {len(layout)} stages, and the pipeline {stages}"
    if sum(layout) != layers:
        return f"it has {sum(layout)} layers, and the model {layers}"
    return "a stage has no layer" if min(layout) < 1 else ""


def present_layout(statuses: Mapping[int, StatusReported], layout: StageLayers) -> StageLayers:
    """The layout of a job; empty if the model is no LayerStack.

    Args:
        statuses: one report per rank.
        layout: the present one; empty for the one with which the script began.
    """
    layers = next((status.layers for status in statuses.values()), 0)
    return layout or even_layout(layers, stages_in(statuses)) if layers else ()


def layers_by_rank(statuses: Mapping[int, StatusReported], layout: StageLayers) -> dict[int, tuple[int, ...]]:
    """The layers of each worker; nothing if the model is no LayerStack.

    Args:
        statuses: one report per rank.
        layout: the present one; empty for the one with which the script began.
    """
    if not (layout := present_layout(statuses, layout)):
        return {}
    first = [0, *accumulate(layout)]
    return {
        rank: tuple(i for stage in sorted(status.stages) for i in range(first[stage], first[stage + 1]))
        for rank, status in statuses.items()
    }


def stages_in(statuses: Mapping[int, StatusReported]) -> int:
    """The number of stages of the pipeline."""
    return 1 + max((stage for status in statuses.values() for stage in status.stages), default=-1)


def moves_between(
    old: Mapping[int, tuple[int, ...]], new: Mapping[int, tuple[int, ...]]
) -> tuple[LayerMove, ...]:
    """What moves: each layer whose worker changes, once. In the same order on all workers.

    Args:
        old: the layers of each rank.
        new: the same layers, dealt anew.
    """
    source = {layer: rank for rank, layers in old.items() for layer in layers}
    moved: dict[tuple[int, int], list[int]] = {}
    for target, layers in sorted(new.items()):
        for layer in layers:
            if source[layer] != target:
                moved.setdefault((source[layer], target), []).append(layer)
    return tuple(LayerMove(*ends, tuple(sorted(layers))) for ends, layers in sorted(moved.items()))
