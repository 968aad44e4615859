"""Layers for stages of which some share a machine, because one runs the workers of another one, too. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from swift_ft.planning.layout.layer_balance import Stage, balance
from swift_ft.planning.layout.profile import LayerProfile
from swift_ft.recovery.layout.stage_layers import StageLayers, layers_of

__all__ = ["balanced", "slowest_ns"]

_ANY_BYTES = 1 << 60


def balanced(layers: Sequence[LayerProfile], machines: Sequence[str | int]) -> StageLayers:
    """The layout in which the slowest machine is fastest, if machines divide their time among their stages.

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
    return tuple(last - first + 1 for first, last in found.stages)


def slowest_ns(layers: Sequence[LayerProfile], machines: Sequence[str | int], layout: StageLayers) -> int:
    """The time that the slowest machine computes for one microbatch."""
    load: Counter[str | int] = Counter()
    for stage, machine in enumerate(machines):
        load[machine] += sum(layers[number].compute_ns for number in layers_of(layout, stage))
    return max(load.values())
