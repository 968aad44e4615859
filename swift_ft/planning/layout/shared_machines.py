"""Layers for stages of which some share a machine, because one runs the workers of another one, too. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from swift_ft.planning.layout.layer_balance import Stage, balance
from swift_ft.planning.layout.profile import LayerProfile
from swift_ft.recovery.layout.stage_layers import StageLayers, layers_of

__all__ = ["balanced", "parts", "slowest_ns", "worth_moving_to"]

_ANY_BYTES = 1 << 60
_WORTH = 0.95
"""A change has to bring the slowest machine down to this share of its time at least."""


def worth_moving_to(
    layers: Sequence[LayerProfile], machines: Sequence[str | int], present: StageLayers
) -> StageLayers:
    """The layout that a job should have: the balanced one, unless the present one is nearly as good.

    Args:
        layers: of the whole model, at least as many as stages.
        machines: of each stage.
        present: the layout of now.
    """
    best = balanced(layers, machines)
    gains = slowest_ns(layers, machines, best) <= _WORTH * slowest_ns(layers, machines, present)
    return best if gains else present


def balanced(layers: Sequence[LayerProfile], machines: Sequence[str | int]) -> StageLayers:
    """A layout in which the slowest machine is as fast as can be.

    It begins with the best one in which each machine gives its stages equal shares of its time. From there
    layers cross the borders of stages one by one, as long as that makes the machines' loads more equal.

    Args:
        layers: of the whole model, at least as many as stages.
        machines: of each stage.
    """
    stages_of = Counter(machines)
    reference = 1
    for count in stages_of.values():
        reference *= count
    stages = [Stage(reference // stages_of[machine], _ANY_BYTES) for machine in machines]
    found = balance(layers, stages, reference=reference, microbatches=1)
    assert found is not None  # there is a layer for each stage
    best = tuple(last - first + 1 for first, last in found.stages)
    while (better := min(_neighbours(best), key=partial(_loads, layers, machines), default=best)) != best:
        if _loads(layers, machines, better) >= _loads(layers, machines, best):
            break
        best = better
    return best


def _neighbours(layout: StageLayers) -> Iterator[StageLayers]:
    """All layouts in which one layer has crossed a border."""
    for stage in range(len(layout) - 1):
        for to, source in ((stage, stage + 1), (stage + 1, stage)):
            if layout[source] > 1:
                moved = [*layout]
                moved[to], moved[source] = moved[to] + 1, moved[source] - 1
                yield tuple(moved)


def _loads(layers: Sequence[LayerProfile], machines: Sequence[str | int], layout: StageLayers) -> list[int]:
    """The time of each machine for one microbatch, the longest first."""
    load: Counter[str | int] = Counter()
    for stage, machine in enumerate(machines):
        load[machine] += sum(layers[number].compute_ns for number in layers_of(layout, stage))
    return sorted(load.values(), reverse=True)


def slowest_ns(layers: Sequence[LayerProfile], machines: Sequence[str | int], layout: StageLayers) -> int:
    """The time that the slowest machine computes for one microbatch."""
    return _loads(layers, machines, layout)[0]


def parts(layers: Sequence[LayerProfile], layout: StageLayers) -> list[list[LayerProfile]]:
    """The layers of each stage."""
    return [[layers[number] for number in layers_of(layout, stage)] for stage in range(len(layout))]
