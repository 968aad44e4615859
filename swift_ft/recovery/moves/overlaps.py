"""Overlaps of the slices of an old layout with those of a new one. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from swift_ft.recovery.layout.mesh import Tiles
from swift_ft.recovery.layout.tensors import Ranges, StateTensor, clipped, overlap


class Overlap(NamedTuple):
    """The intersection of an old and a new slice of a tensor.

    Attributes:
        old: index of the old slice.
        new: index of the new slice.
        ranges: what they share, without padding.
        nbytes: the size of the shared part.
    """

    old: int
    new: int
    ranges: Ranges
    nbytes: int


class Group(NamedTuple):
    """Tensors that are cut alike before and after, and held by the same.

    Attributes:
        held: their old slices, with devices.
        wanted: their new slices, with slots.
        overlaps: of all pairs that share something.
    """

    names: list[str]
    held: Tiles
    wanted: Tiles
    overlaps: tuple[Overlap, ...]


def groups_of(tensors: Sequence[StateTensor], held: Sequence[Tiles], wanted: Sequence[Tiles]) -> list[Group]:
    """The groups, in order of their first tensors.

    Args:
        tensors: the whole state.
        held: for each tensor its old slices. Tensors that are divided alike share one object.
        wanted: the same of the new layout.
    """
    groups: dict[tuple[int, int, int], Group] = {}
    for tensor, old, new in zip(tensors, held, wanted, strict=True):
        key = (id(old), id(new), tensor.itemsize)
        if key not in groups:
            groups[key] = Group([], old, new, tuple(overlaps(tensor, old, new)))
        groups[key].names.append(tensor.name)
    return list(groups.values())


def overlaps(tensor: StateTensor, held: Tiles, wanted: Tiles) -> Iterator[Overlap]:
    """All pairs of old and new slices that share something, by new slice, then by old slice."""
    old = [clipped(ranges, tensor.shape) for ranges, _ in held]
    new = [clipped(ranges, tensor.shape) for ranges, _ in wanted]
    elements = np.ones((len(new), len(old)), dtype=np.int64)
    for dimension in range(len(tensor.shape)):
        a, b = (np.array([ranges[dimension] for ranges in side], dtype=np.int64) for side in (new, old))
        low = np.maximum(a[:, None, 0], b[None, :, 0])
        elements *= np.maximum(np.minimum(a[:, None, 1], b[None, :, 1]) - low, 0)
    for i, j in zip(*(index.tolist() for index in np.nonzero(elements)), strict=True):
        yield Overlap(j, i, overlap(new[i], old[j]), int(elements[i, j]) * tensor.itemsize)
