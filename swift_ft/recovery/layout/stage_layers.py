"""The layers on each stage of a :class:`swift_ft.LayerStack`, and what moves when they change. Pure.

A layout here is the number of layers of each stage, in the pipeline's order: ``(3, 2, 3)``. Where pipelines
are replicas of each other, the next one's follow, which may have another number of stages:
``(3, 2, 3, 4, 4)``. The stages and their workers stay the same. A machine that runs the workers of another
one, too, gets fewer layers for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

from swift_ft.recovery.events import StatusReported

_Of = TypeVar("_Of")
StageLayers = tuple[int, ...]
"""The number of layers of each stage, of all pipelines one after the other."""


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


def cuts_of(layout: tuple[_Of, ...], stages: Sequence[int]) -> list[tuple[_Of, ...]]:
    """The parts of a layout, or of what goes by its stages, by pipeline.

    Args:
        layout: over all pipelines.
        stages: that each pipeline has.
    """
    ends = [0, *accumulate(stages)]
    return [layout[first:end] for first, end in pairwise(ends)]


def layers_of(layout: StageLayers, stage: int) -> range:
    """The layers of a stage."""
    first = sum(layout[:stage])
    return range(first, first + layout[stage])


def why_no_layout(layout: StageLayers, layers: int, stages: Sequence[int]) -> str:
    """Why a layout cannot be; empty if it can.

    Args:
        layout: that is asked for.
        layers: of the model; 0 if it is not a LayerStack.
        stages: that each pipeline has.
    """
    if not layers:
        return "the model is no LayerStack"
    if len(layout) != sum(stages):
        return f"it has {len(layout)} stages, and the job {sum(stages)}"
    for cut in cuts_of(layout, stages):
        if (found := sum(cut)) != layers:
            return f"it has {found} layers, and the model {layers}"
    return "a stage has no layer" if min(layout) < 1 else ""


def present_layout(statuses: Mapping[int, StatusReported], layout: StageLayers) -> StageLayers:
    """The layout of a job; empty if the model is not a LayerStack.

    Args:
        statuses: one report per rank.
        layout: the present one; empty for the one with which the script began.
    """
    begun = begun_layout(statuses)
    return (layout or begun) if begun else ()


def begun_layout(statuses: Mapping[int, StatusReported]) -> StageLayers:
    """The layout with which the scripts of a job begin; empty if the model is not a LayerStack."""
    layers = next((status.layers for status in statuses.values()), 0)
    if not layers:
        return ()
    found: StageLayers = ()
    for ranks, stages in zip(pipelines_in(statuses), stages_in(statuses), strict=True):
        planned = next((statuses[rank].cut for rank in ranks if statuses[rank].cut), ())
        found += planned or even_layout(layers, stages)
    return found


def layers_by_rank(statuses: Mapping[int, StatusReported], layout: StageLayers) -> dict[int, tuple[int, ...]]:
    """The layers of each worker; nothing if the model is not a LayerStack.

    Args:
        statuses: one report per rank.
        layout: the present one; empty for the one with which the script began.
    """
    if not (layout := present_layout(statuses, layout)):
        return {}
    found: dict[int, tuple[int, ...]] = {}
    for cut, ranks in cuts_in(statuses, layout):
        first = [0, *accumulate(cut)]
        for rank in ranks:
            stages = sorted(statuses[rank].stages)
            found[rank] = tuple(i for stage in stages for i in range(first[stage], first[stage + 1]))
    return {rank: found[rank] for rank in statuses}


def replicated_layers(
    statuses: Mapping[int, StatusReported], layout: StageLayers
) -> dict[int, tuple[int, ...]] | None:
    """The layers of each worker where pipelines are replicas of each other, by rank; None elsewhere."""
    several = len(pipelines_in(statuses)) > 1
    return (layers_by_rank(statuses, layout) or None) if several else None


def cuts_in(
    statuses: Mapping[int, StatusReported], layout: StageLayers
) -> list[tuple[StageLayers, tuple[int, ...]]]:
    """The layers of each stage of a pipeline, and its ranks, for all pipelines.

    Args:
        statuses: one report per rank.
        layout: the present one.
    """
    return [*zip(cuts_of(layout, stages_in(statuses)), pipelines_in(statuses), strict=True)]


def pipelines_in(statuses: Mapping[int, StatusReported]) -> list[tuple[int, ...]]:
    """The ranks of each pipeline, ascending."""
    found: dict[int, list[int]] = {}
    for rank in sorted(statuses):
        found.setdefault(statuses[rank].pipeline, []).append(rank)
    return [tuple(found[pipeline]) for pipeline in sorted(found)]


def stages_in(statuses: Mapping[int, StatusReported]) -> tuple[int, ...]:
    """The number of stages of each pipeline."""
    return tuple(
        1 + max((stage for rank in ranks for stage in statuses[rank].stages), default=-1)
        for ranks in pipelines_in(statuses)
    )


def moves_between(
    old: Mapping[int, tuple[int, ...]],
    new: Mapping[int, tuple[int, ...]],
    pipelines: Iterable[Iterable[int]] | None = None,
) -> tuple[LayerMove, ...]:
    """The moves between two layouts: each layer whose worker changes, once. In equal order on all workers.

    Args:
        old: the layers of each rank.
        new: the same layers, dealt out again.
        pipelines: the ranks of each. Layers stay in their pipeline. None if there is only one.
    """
    moved: dict[tuple[int, int], list[int]] = {}
    for ranks in pipelines if pipelines is not None else [old]:
        source = {layer: rank for rank in ranks for layer in old[rank]}
        for target in ranks:
            for layer in new[target]:
                if source[layer] != target:
                    moved.setdefault((source[layer], target), []).append(layer)
    return tuple(LayerMove(*ends, tuple(sorted(layers))) for ends, layers in sorted(moved.items()))
