"""Layers for stages of unequal speed, so that the slowest stage is fastest (AutoHet §III-C, eq. 4). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from swift_ft.costs.layer_profile import LayerProfile, copies_bytes


@dataclass(frozen=True)
class Stage:
    """The device of one stage.

    Attributes:
        power: in the unit of ``reference``.
        memory_bytes: that its layers may use.
    """

    power: int
    memory_bytes: int


@dataclass(frozen=True)
class Balance:
    """Layers of stages.

    Attributes:
        stages: first and last layer of each.
        times_ns: of each, forward and backward.
    """

    stages: tuple[tuple[int, int], ...]
    times_ns: tuple[int, ...]

    def iteration_ns(self, microbatches: int) -> int:
        """An iteration (AutoHet's eq. 1): the sum of the stages, and the slowest once more per microbatch."""
        return sum(self.times_ns) + (microbatches - 1) * max(self.times_ns)


def balance(
    layers: Sequence[LayerProfile], stages: Sequence[Stage], *, reference: int, microbatches: int
) -> Balance | None:
    """The cut whose slowest stage is fastest; None if no cut fits into the memory.

    Exact, by bisection over the time of the slowest stage, and all ends of stages within it. A stage keeps
    the activations of as many microbatches as 1F1B has in flight there, and a copy of what its layers
    share with layers of other stages.

    Args:
        layers: with times as on a device of power ``reference``.
        stages: in order; each gets at least one layer.
        reference: that power.
        microbatches: per iteration.
    """
    if len(layers) < len(stages):
        return None
    cut = _Cut(layers, stages, reference, microbatches)
    work = cut.compute[-1]
    high = -(-work * reference // min(stage.power for stage in stages))
    if cut.at_most(high) is None:
        return None
    low = work * reference // sum(stage.power for stage in stages) - 1  # no cut has a faster slowest stage
    near = low + 1 + max(layer.compute_ns for layer in layers) * reference // min(s.power for s in stages)
    if near < high:
        low, high = (low, near) if cut.at_most(near) is not None else (near, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if cut.at_most(middle) is not None else (middle, high)
    ends = cut.at_most(high)
    assert ends is not None
    starts = [0, *ends[:-1]]
    times = (cut.time_ns(i, first, end) for i, (first, end) in enumerate(zip(starts, ends, strict=True)))
    return Balance(tuple((first, end - 1) for first, end in zip(starts, ends, strict=True)), tuple(times))


def fits(
    layers: Sequence[LayerProfile], stages: Sequence[Stage], ends: Sequence[int], *, microbatches: int
) -> bool:
    """Whether each stage has the memory for its layers; see :func:`balance`.

    Args:
        ends: of each stage, the layer that the next one begins with.
    """
    cut, starts = _Cut(layers, stages, 1, microbatches), [0, *ends[:-1]]
    return all(
        cut.memory_bytes(number, starts[number], ends[number]) <= stage.memory_bytes
        for number, stage in enumerate(stages)
    )


class _Cut:
    """Cuts of one pipeline."""

    def __init__(
        self, layers: Sequence[LayerProfile], stages: Sequence[Stage], reference: int, microbatches: int
    ) -> None:
        self.stages, self.reference, self.microbatches = stages, reference, microbatches
        self.layers = layers
        self.shares = any(layer.shared_with is not None for layer in layers)
        self.compute = (0, *accumulate(layer.compute_ns for layer in layers))
        self.state = (0, *accumulate(layer.state_bytes for layer in layers))
        self.activation = (0, *accumulate(layer.activation_bytes for layer in layers))

    def time_ns(self, stage: int, first: int, end: int) -> int:
        """Of layers ``first`` to ``end - 1`` on a stage."""
        return -(-(self.compute[end] - self.compute[first]) * self.reference // self.stages[stage].power)

    def memory_bytes(self, stage: int, first: int, end: int) -> int:
        """Of these layers, with the activations in flight."""
        kept = min(self.microbatches, len(self.stages) - stage)
        state = self.state[end] - self.state[first]
        if self.shares:
            state += copies_bytes(self.layers, first, end)
        return state + kept * (self.activation[end] - self.activation[first])

    def at_most(self, limit_ns: int) -> list[int] | None:
        """The end of each stage, if all layers fit into stages that take no longer."""
        count = len(self.compute) - 1
        starts = [{0: 0}]  # by stage: each layer it can begin with, and the beginning of the stage before
        for number in range(len(self.stages)):
            last = count - (len(self.stages) - number - 1)  # the stages behind it need a layer each
            ends: dict[int, int] = {}
            reached = 0
            for first in sorted(starts[-1]):
                reached = max(reached, first)
                while reached < last and self._fits(number, first, reached + 1, limit_ns):
                    reached += 1
                for end in range(max(first, max(ends, default=0)) + 1, reached + 1):
                    ends[end] = first
            starts.append(ends)
        if count not in starts[-1]:
            return None
        ends_of = [count]
        for before in reversed(starts[2:]):
            ends_of.append(before[ends_of[-1]])
        return ends_of[::-1]

    def _fits(self, stage: int, first: int, end: int, limit_ns: int) -> bool:
        fast = self.time_ns(stage, first, end) <= limit_ns
        return fast and self.memory_bytes(stage, first, end) <= self.stages[stage].memory_bytes
