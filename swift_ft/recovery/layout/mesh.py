"""Layouts of workers, and which slices of which tensors each of their slots holds (Tenplex §4.1). Pure.

A layout is a list of pipelines, each a list of stages. A stage is ep * sp * tp workers. Slots are numbered
pipeline by pipeline, then stage by stage, then by expert, sequence and tensor index, which counts fastest.
Pipelines may differ in their stages, as Oobleck's and AutoHet's do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from swift_ft.errors import UsageError
from swift_ft.recovery.layout.tensors import Ranges, StateTensor, count

Stages = tuple[tuple[int, int], ...]
"""First and last layer of each stage, in order."""

Tiles = tuple[tuple[Ranges, tuple[int, ...]], ...]
"""The different slices of one tensor, and for each the slots (or devices) that hold it."""


class Slot(NamedTuple):
    """A worker's place in a layout."""

    pipeline: int
    stage: int
    ep: int
    sp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """A layout: who computes what.

    Attributes:
        pipelines: the stages of each pipeline. All pipelines have all layers.
        tp: workers that share each tensor.
        ep: workers that share the experts.
        sp: workers that share a sequence. They hold the same state, unless a tensor is split by "sp".
        lengths: unequal slices: by name of the tensor and axis, the length of each slice.
    """

    pipelines: tuple[Stages, ...]
    tp: int = 1
    ep: int = 1
    sp: int = 1
    lengths: Mapping[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.pipelines or min(self.tp, self.ep, self.sp) < 1:
            raise UsageError("a layout needs at least one pipeline, and degrees of one or more")
        layers = {stages[-1][1] if stages else -1 for stages in self.pipelines}
        for stages in self.pipelines:
            starts = [0, *(last + 1 for _, last in stages)]
            if [first for first, _ in stages] != starts[:-1] or any(last < first for first, last in stages):
                raise UsageError(f"the stages {list(map(list, stages))} are not all layers in order, from 0")
        if len(layers) > 1:
            raise UsageError(f"the pipelines end at different layers: {sorted(layers)}")

    @property
    def per_stage(self) -> int:
        """Workers of a stage."""
        return self.tp * self.ep * self.sp

    @property
    def size(self) -> int:
        """Slots of the layout."""
        return sum(map(len, self.pipelines)) * self.per_stage

    def slots(self) -> Iterator[Slot]:
        """All slots, in the order of their numbers."""
        for pipeline, stages in enumerate(self.pipelines):
            for stage in range(len(stages)):
                for ep in range(self.ep):
                    for sp in range(self.sp):
                        yield from (Slot(pipeline, stage, ep, sp, tp) for tp in range(self.tp))

    def degree(self, axis: str) -> int:
        """The number of slices of an axis."""
        return {"dp": len(self.pipelines), "tp": self.tp, "ep": self.ep, "sp": self.sp}[axis]


def stages_of(sizes: Iterable[int]) -> Stages:
    """Stages of so many layers, in order."""
    return tuple((first, end - 1) for first, end in pairwise([0, *accumulate(sizes)]))


def tiles_of(tensors: Sequence[StateTensor], layout: Layout) -> list[Tiles]:
    """For each tensor the slices that the layout makes of it, and the slots that hold each.

    Slices of a dimension are as DTensor's: of equal length, rounded up, the last ones shorter or absent.
    Tensors that are divided alike share one object.

    Raises:
        UsageError: if lengths of unequal slices do not add up, or the layout lacks a tensor's layers.
    """
    stages = [dict[int, list[int]]() for _ in layout.pipelines]  # by pipeline and layer: slots
    slots = list(layout.slots())
    for number, slot in enumerate(slots):
        first, last = layout.pipelines[slot.pipeline][slot.stage]
        for layer in range(first, last + 1):
            stages[slot.pipeline].setdefault(layer, []).append(number)
    made: dict[object, Tiles] = {}
    holders: dict[tuple[int, ...], tuple[int, ...]] = {}
    found = []
    for tensor in tensors:
        if tensor.layers not in holders:
            found_at = {n for by_layer in stages for layer in tensor.layers for n in by_layer.get(layer, ())}
            holders[tensor.layers] = tuple(sorted(found_at))
            if not found_at:
                raise UsageError(f"{tensor.name}: the layout has none of its layers {list(tensor.layers)}")
        lengths = tuple(layout.lengths.get((tensor.name, axis)) for axis, _ in tensor.split)
        group = None if tensor.expert is None else tensor.expert[0] * layout.ep // tensor.expert[1]
        at = holders[tensor.layers]
        key = (at, tensor.shape, tensor.split, tensor.pad_to, group, lengths)
        if key not in made:
            made[key] = _tiles(tensor, layout, [(n, slots[n]) for n in at if group in (None, slots[n].ep)])
        found.append(made[key])
    return found


def held_by(tensors: Sequence[StateTensor], tiles: Sequence[Tiles]) -> dict[int, dict[str, Ranges]]:
    """The same by slot: the slice of each tensor that it holds."""
    held: dict[int, dict[str, Ranges]] = {}
    for tensor, slices in zip(tensors, tiles, strict=True):
        for ranges, slots in slices:
            for slot in slots:
                held.setdefault(slot, {})[tensor.name] = ranges
    return held


def _tiles(tensor: StateTensor, layout: Layout, holders: Sequence[tuple[int, Slot]]) -> Tiles:
    by_ranges: dict[Ranges, list[int]] = {}
    by_indices: dict[tuple[int, ...], Ranges] = {}
    for number, slot in holders:
        indices = tuple(slot.pipeline if a == "dp" else int(getattr(slot, a)) for a, _ in tensor.split)
        if indices not in by_indices:
            by_indices[indices] = _ranges(tensor, layout, indices)
        by_ranges.setdefault(by_indices[indices], []).append(number)
    return tuple((ranges, tuple(slots)) for ranges, slots in sorted(by_ranges.items()) if count(ranges))


def _ranges(tensor: StateTensor, layout: Layout, indices: Sequence[int]) -> Ranges:
    """The slice at an index along each splitting axis. With padding it may reach beyond the tensor's end."""
    ranges = [(0, length) for length in tensor.shape]
    for number, ((axis, dimension), index) in enumerate(zip(tensor.split, indices, strict=True)):
        start, end = ranges[dimension]
        lengths = layout.lengths.get((tensor.name, axis))
        if lengths is not None:
            if tensor.pad_to:
                raise UsageError(f"{tensor.name}: slices of given lengths cannot be padded: set pad_to to 0")
            if len(lengths) != layout.degree(axis) or sum(lengths) != end - start or min(lengths) < 0:
                raise UsageError(
                    f"{tensor.name}: the slices {lengths} along {axis} must be {layout.degree(axis)} lengths "
                    f"that add up to {end - start}"
                )
            low = start + sum(lengths[:index])
            ranges[dimension] = (low, low + lengths[index])
            continue
        step = -(-(end - start) // layout.degree(axis))
        if tensor.pad_to:
            # Axes that cut the slice again must divide it, or their slices would reach into the next one.
            again = [layout.degree(a) for a, d in tensor.split[number + 1 :] if d == dimension]
            unit = tensor.pad_to * prod(again)
            step = -(-step // unit) * unit
        low, high = start + index * step, start + (index + 1) * step
        ranges[dimension] = (low, high) if tensor.pad_to else (min(low, end), min(high, end))
    return tuple(ranges)
