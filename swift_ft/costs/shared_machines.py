"""Work for unlike machines: layers for their stages, microbatches for their pipelines. Pure.

Machines are unlike where one is slower, or runs the workers of a lost one, too.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

from swift_ft.costs.layer_balance import Stage, balance, fits
from swift_ft.costs.layer_profile import NANOSECONDS, LayerProfile
from swift_ft.errors import UsageError
from swift_ft.recovery.layout.stage_layers import StageLayers, layers_of

_ANY_BYTES = 1 << 60
_WORTH = 0.95
"""A change has to bring the slowest machine down to this share of its time at least."""
_AS_OTHERS = 1000

Paces = Mapping[str, int]
"""The time that each slow machine takes, in thousandths of what others take."""
_NONE: Paces = MappingProxyType({})


_GAIN = 1.05
"""By how much an iteration must become shorter."""


def worth_moving_to(
    layers: Sequence[LayerProfile], machines: Sequence[str], present: StageLayers, paces: Paces = _NONE
) -> StageLayers:
    """The layout that a job should have: the balanced one, unless the present one is nearly as good.

    Args:
        layers: of the whole model, at least as many as stages, with times as on an ordinary machine.
        machines: one for each stage.
        present: the layout of now.
        paces: of slow machines.
    """
    best = balanced(layers, machines, paces)
    before, after = (slowest_ns(layers, machines, layout, paces) for layout in (present, best))
    return best if after <= _WORTH * before else present


def relative_layers(costs: Sequence[float]) -> tuple[LayerProfile, ...]:
    """Layers with these times, in any unit.

    Raises:
        UsageError: a cost is negative, infinite or no number, or all are 0.
    """
    for number, cost in enumerate(costs):
        if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < math.inf:
            raise UsageError(f"costs= has {cost!r} for layer {number}: it must be a number from 0 on.")
    if not (most := max(costs, default=0)):
        raise UsageError("costs= has no layer that costs anything: give a number for each layer.")
    return tuple(LayerProfile(0, round(cost / most * NANOSECONDS), 0) for cost in costs)


def balanced(layers: Sequence[LayerProfile], machines: Sequence[str], paces: Paces = _NONE) -> StageLayers:
    """A layout in which the slowest machine is as fast as can be.

    It begins with the best one in which each machine gives its stages equal shares of its time. From there
    layers cross the borders of stages one by one, as long as that makes the machines' loads more equal.

    Args:
        layers: of the whole model, at least as many as stages, with times as on an ordinary machine.
        machines: one for each stage.
        paces: of slow machines.
    """
    stages_of = Counter(machines)
    takes = [stages_of[machine] * paces.get(machine, _AS_OTHERS) for machine in machines]
    reference = math.lcm(*takes)
    stages = [Stage(reference * _AS_OTHERS // one, _ANY_BYTES) for one in takes]
    found = balance(layers, stages, reference=reference, microbatches=1)
    assert found is not None  # there is a layer for each stage
    best = tuple(last - first + 1 for first, last in found.stages)

    def loads(layout: StageLayers) -> list[int]:
        return sorted(_loads(layers, machines, layout, paces).values(), reverse=True)

    while (better := min(_neighbours(best), key=loads, default=best)) != best:
        if loads(better) >= loads(best):
            break
        best = better
    return best


def balanced_within(layers: Sequence[LayerProfile], room_bytes: Sequence[int]) -> StageLayers | None:
    """The layout of equal machines whose slowest stage is fastest, of those that fit; None if none does.

    Args:
        layers: of the whole model, at least as many as stages.
        room_bytes: for the layers of each stage, with the activations that 1F1B keeps there.
    """
    stages = [Stage(1, room) for room in room_bytes]
    fastest = balanced(layers, [str(stage) for stage in range(len(stages))])
    if fits(layers, stages, [*accumulate(fastest)], microbatches=len(stages)):
        return fastest
    found = balance(layers, stages, reference=1, microbatches=len(stages))
    return None if found is None else tuple(last - first + 1 for first, last in found.stages)


def _neighbours(layout: StageLayers) -> Iterator[StageLayers]:
    """All layouts in which one layer has crossed a border."""
    for stage in range(len(layout) - 1):
        for to, source in ((stage, stage + 1), (stage + 1, stage)):
            if layout[source] > 1:
                moved = [*layout]
                moved[to], moved[source] = moved[to] + 1, moved[source] - 1
                yield tuple(moved)


def _loads(
    layers: Sequence[LayerProfile], machines: Sequence[str], layout: StageLayers, paces: Paces
) -> Counter[str]:
    """The time of each machine for one microbatch, all its stages together, in thousandths of nanoseconds."""
    load: Counter[str] = Counter()
    for stage, machine in enumerate(machines):
        own = sum(layers[number].compute_ns for number in layers_of(layout, stage))
        load[machine] += own * paces.get(machine, _AS_OTHERS)
    return load


def loads_of_pipelines(
    layers: Sequence[LayerProfile],
    machines: Sequence[Sequence[str]],
    cuts: Sequence[StageLayers],
    paces: Paces = _NONE,
) -> list[list[int]]:
    """By pipeline, the time of each of its machines for one microbatch, in nanoseconds, the longest first.

    A machine that computes stages of several pipelines takes the time of all of them in each.

    Args:
        layers: of the whole model, with times as on an ordinary machine.
        machines: of each stage, by pipeline.
        cuts: the layers of each stage, by pipeline.
        paces: of slow machines.
    """
    own = [_loads(layers, *pipeline, paces) for pipeline in zip(machines, cuts, strict=True)]
    of_all = sum(own, Counter[str]())
    return [sorted((of_all[one] // _AS_OTHERS for one in loads), reverse=True) for loads in own]


def slowest_ns(
    layers: Sequence[LayerProfile], machines: Sequence[str], layout: StageLayers, paces: Paces = _NONE
) -> int:
    """The time that the slowest machine computes for one microbatch."""
    return max(_loads(layers, machines, layout, paces).values()) // _AS_OTHERS


def parts(layers: Sequence[LayerProfile], layout: StageLayers) -> list[list[LayerProfile]]:
    """The layers of each stage."""
    return [[layers[number] for number in layers_of(layout, stage)] for stage in range(len(layout))]


# Shares of microbatches for pipelines that are unlike (Oobleck §5.2, by makespan).
#
# Oobleck minimises the variance of the pipelines' times, one count for all that have the same template. An
# iteration takes as long as its slowest pipeline, so the longest time is what counts here.


def pipeline_ns(machines: Sequence[int], microbatches: int) -> int:
    """The time of a pipeline: one microbatch through all machines, and the others through the slowest one.

    Args:
        machines: what each takes for a microbatch, all its stages together, in nanoseconds.
        microbatches: per iteration.
    """
    return sum(machines) + (microbatches - 1) * max(machines)


def share_microbatches(pipelines: Sequence[Sequence[int]], microbatches: int, fewest: int = 1) -> list[int]:
    """The microbatches of each pipeline, so that the slowest one ends as early as can be.

    One after the other goes where it ends first, which is best: the times grow with each microbatch.

    Args:
        pipelines: what each machine of each pipeline takes for a microbatch, in nanoseconds.
        microbatches: of all pipelines, at least ``fewest`` for each.
        fewest: that a pipeline can have.
    """
    counts = [fewest] * len(pipelines)
    ends = [(pipeline_ns(machines, fewest + 1), number) for number, machines in enumerate(pipelines)]
    heapq.heapify(ends)
    for _ in range(microbatches - fewest * len(pipelines)):
        end, number = heapq.heappop(ends)
        counts[number] += 1
        heapq.heappush(ends, (end + max(pipelines[number]), number))
    return counts


def worth_sharing(pipelines: Sequence[Sequence[int]], present: Sequence[int], fewest: int = 1) -> list[int]:
    """The microbatches that each pipeline should have: the best shares, unless the present ones are as good.

    Args:
        pipelines: what each machine of each pipeline takes for a microbatch, in nanoseconds.
        present: the microbatches that each has.
        fewest: that a pipeline can have.
    """
    best = share_microbatches(pipelines, sum(present), fewest)
    before, after = (max(map(pipeline_ns, pipelines, counts)) for counts in (present, best))
    return best if before >= _GAIN * after else [*present]
