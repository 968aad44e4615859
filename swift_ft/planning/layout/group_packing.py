"""Checks that a number of device groups fits into a cluster. Pure.

Of the groups that are good enough only the smallest matter. D of them fit if the sum of D such sets has a
member within the cluster's counts: a (min, +) power, computed by doubling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

Groups = tuple[tuple[int, ...], ...]
"""For each group the count of each kind."""

_LARGEST_TABLE = 1_000_000  # entries


Table = npt.NDArray[np.int64]
NONE = 2**60
"""Stands in a table where no group is."""


class Packing:
    """Packs groups into a cluster.

    Args:
        counts: of each kind of device in the cluster; those of the strongest last.
        operations: that all packing may take, in additions of two entries.

    Attributes:
        is_too_large: whether there are too many counts for a table.
    """

    def __init__(self, counts: Sequence[int], operations: int) -> None:
        self._strongest = counts[-1]
        self._entries = prod(count + 1 for count in counts[:-1])
        self._left = operations
        self.is_too_large = self._entries > _LARGEST_TABLE

    def packed(self, table: Table, number: int) -> Groups | None:
        """So many groups that together fit into the cluster; None if there are none.

        Args:
            table: of the smallest groups, as :func:`~swift_ft.planning.layout.group_packing.smallest_groups`
                makes it.
            number: how many groups.

        Raises:
            OverflowError: if that takes too many operations.
        """
        self._spend(self._entries)
        if self.is_too_large:
            raise OverflowError
        powers, tables = {1: table}, [1]
        while tables[-1] * 2 <= number:
            tables.append(tables[-1] * 2)
            powers[tables[-1]] = self._sum(powers[tables[-2]], powers[tables[-2]])
        total, parts = None, []
        for size in reversed(tables):
            if number & size:
                total = powers[size] if total is None else self._sum(total, powers[size])
                parts.append((size, total))
        assert total is not None, "there is at least one group"
        if total.min(initial=NONE) >= NONE:
            return None
        at = tuple(int(i) for i in np.unravel_index(int(np.argmin(total)), total.shape))
        return tuple(_unpacked(powers, parts, at))

    def _spend(self, operations: int) -> None:
        self._left -= operations
        if self._left < 0:
            raise OverflowError

    def _sum(self, one: Table, other: Table) -> Table:
        """Pairs of an entry of each, with the counts added."""
        total = np.full_like(one, NONE)
        entries = np.argwhere(one < NONE)
        self._spend(len(entries) * (other.size + 1000))
        for at in entries.tolist():
            there = tuple(slice(i, None) for i in at)
            here = tuple(slice(n - i) for n, i in zip(one.shape, at, strict=True))
            total[there] = np.minimum(total[there], other[here] + one[tuple(at)])
        total[total > self._strongest] = NONE
        return frontier(total)


def _unpacked(
    powers: dict[int, Table], parts: list[tuple[int, Table]], at: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """The single groups of a sum."""
    groups = []
    due = []
    for i in range(len(parts) - 1, 0, -1):
        own, at = _split(parts[i][1], powers[parts[i][0]], parts[i - 1][1], at)
        due.append((parts[i][0], own))
    due.append((parts[0][0], at))
    while due:
        size, at = due.pop()
        if size == 1:
            groups.append((*at, int(powers[1][at])))
            continue
        one, other = _split(powers[size], powers[size // 2], powers[size // 2], at)
        due += [(size // 2, one), (size // 2, other)]
    return groups


def _split(
    total: Table, one: Table, other: Table, at: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two entries whose sum is an entry of their sum."""
    for part in np.argwhere(one < NONE).tolist():
        rest = tuple(a - b for a, b in zip(at, part, strict=True))
        if min(rest, default=0) >= 0 and one[tuple(part)] + other[rest] == total[at]:
            return tuple(part), rest
    raise AssertionError("an entry of a sum has two parts")


# The smallest groups of unlike devices that reach an effective power, as a table.
#
# A table has an axis for each kind of device but the last, and says how many of the last kind a group needs
# beside these counts of the others.


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
