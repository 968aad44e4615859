"""The smallest groups of unlike devices that reach an effective power, as a table. Pure.

A table has an axis for each kind of device but the last, and says how many of the last kind a group needs
beside these counts of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.int64]
NONE = 2**60
"""Stands in a table where no group is."""


@dataclass(frozen=True)
class Kind:
    """Interchangeable devices.

    Attributes:
        power: computing power of one; whole numbers of any unit.
        memory_bytes: per device.
        count: how many there are.
    """

    power: int
    memory_bytes: int
    count: int


@dataclass(frozen=True)
class Task:
    """The task of each group.

    Attributes:
        memory_bytes: a group has at least as much.
        microbatches: of a pipeline in an iteration.
        most_stages: the largest number of devices in a group: one per layer.
    """

    memory_bytes: int
    microbatches: int
    most_stages: int


def smallest_groups(kinds: Sequence[Kind], task: Task, z: int) -> Table:
    """For each count of the weaker kinds, how many of the strongest a group needs to reach a power."""
    *weaker, strongest = kinds
    shape = [min(kind.count, task.most_stages) + 1 for kind in weaker]
    counts = np.indices(shape).reshape(len(weaker), -1) if weaker else np.zeros((0, 1), dtype=np.int64)
    k = task.microbatches
    power = np.full(counts.shape[1], z * (k - 1), dtype=np.int64)
    memory = np.full(counts.shape[1], task.memory_bytes, dtype=np.int64)
    for kind, n in zip(weaker, counts, strict=True):
        power -= n * (kind.power * k - z)
        memory -= n * kind.memory_bytes
    need = np.where(counts.sum(axis=0) > 0, 0, 1)
    gain = strongest.power * k - z
    if gain > 0:
        need = np.maximum(need, -(-power // gain))
    need = np.maximum(need, -(-memory // strongest.memory_bytes))
    unfit = (need > strongest.count) | (counts.sum(axis=0) + need > task.most_stages)
    if gain <= 0:
        unfit |= power - need * gain > 0
    table = np.full([kind.count + 1 for kind in weaker], NONE, dtype=np.int64)
    table[tuple(slice(n) for n in shape)] = np.where(unfit, NONE, need).reshape(shape)
    return frontier(table)


def frontier(table: Table) -> Table:
    """A table without the entries for which another needs no more of any kind."""
    before = np.full_like(table, NONE)
    least = table
    for axis in range(table.ndim):
        least = np.minimum.accumulate(least, axis=axis)
    for axis in range(table.ndim):
        moved = np.moveaxis(before, axis, 0)
        if moved.shape[0] > 1:
            moved[1:] = np.minimum(moved[1:], np.moveaxis(least, axis, 0)[:-1])
    return np.where(table < before, table, NONE)
