"""Groups of unlike devices of about equal power, one per pipeline (AutoHet §III-B, eqs. 2 and 3). Pure.

A group is written as counts of each kind, since devices of a kind are interchangeable. Its effective power is
``S K / (K + P - 1)``: the sum of its devices' power without the bubble of a pipeline of P stages and K
microbatches. Sought is the largest number of groups times the least effective power among them.

``S K / (K + P - 1) >= z`` is linear in the counts: ``sum of (g K - z) x >= z (K - 1)``. So the groups that
reach z have a few smallest members, and ``group_packing.py`` finds whether D of them fit into the cluster. No
group needs all devices; those that would help none are left over.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod

import numpy as np
import numpy.typing as npt

from swift_ft.planning.layout.group_packing import NONE, Groups, Kind, Packing, Task, smallest_groups

_OPERATIONS = 1_500_000_000  # of the exact search: some seconds
_FAST = 96  # devices that are searched in less than a second


_PRICES = 2000  # combinations that are tried, about
_RANGES = 200  # of powers that are looked at, fewer where tables are large
_ENTRIES = 40_000_000  # of all tables together
_CLOSE = 1e-4  # relative width of a range that is not halved any more
_ROUNDING = 1 + 1e-9  # floats are off by less


@dataclass(frozen=True)
class Grouping:
    """Groups of devices.

    Attributes:
        groups: for each the count of each kind, the strongest group first.
        least: effective power of the weakest group.
        bound: no grouping has a larger product of the number of groups and the least power.
    """

    groups: Groups
    least: Fraction
    bound: Fraction

    @property
    def product(self) -> Fraction:
        """The number of groups times the least effective power."""
        return len(self.groups) * self.least

    @property
    def is_proven(self) -> bool:
        """Whether the bound is reached, to one part in a billion."""
        return self.bound <= self.product * (1 + Fraction(1, 10**9))


def power_of(group: Sequence[int], kinds: Sequence[Kind], microbatches: int) -> Fraction:
    """Effective power of a group (eq. 2), with the bubble of its pipeline."""
    total = sum(kind.power * n for kind, n in zip(kinds, group, strict=True))
    return Fraction(total * microbatches, microbatches + sum(group) - 1)


def group_devices(kinds: Sequence[Kind], task: Task) -> list[Grouping]:
    """The best grouping first, then good ones for other numbers of groups.

    Exact while the search is affordable: with two kinds beyond 1,000 devices, with three up to about 100.
    Beyond, the groups are those of a part of the cluster, repeated, or the devices dealt out evenly, and
    ``bound`` says what may be missed.

    Args:
        task: the same for every group.

    Returns:
        Nothing if no group has enough memory.
    """
    order = sorted(range(len(kinds)), key=lambda i: (kinds[i].power, kinds[i].memory_bytes, i))
    search = _Search([kinds[i] for i in order], task)
    found = search.run()
    if found and not found[0].is_proven:
        found = sorted([*search.repeated(found[0].bound), *found], key=lambda one: -one.product)
        found = search.bounded(found)
    place = [order.index(i) for i in range(len(kinds))]

    def in_order(groups: Groups) -> Groups:
        given = (tuple(group[i] for i in place) for group in groups)
        return tuple(sorted(given, key=lambda group: (-power_of(group, kinds, task.microbatches), group)))

    return [Grouping(in_order(one.groups), one.least, one.bound) for one in found]


class _Search:
    """One search; kinds are in order of power."""

    def __init__(self, kinds: Sequence[Kind], task: Task) -> None:
        self.kinds, self.task = kinds, task
        self.packing = Packing([kind.count for kind in kinds], _OPERATIONS)
        memory = sum(kind.memory_bytes * kind.count for kind in kinds)
        devices = sum(kind.count for kind in kinds)
        self.most_groups = min(devices, memory // task.memory_bytes if task.memory_bytes else devices)

    def run(self) -> list[Grouping]:
        """Improves the evenly dealt groups number by number, the most promising one first."""
        best: dict[int, tuple[Groups, Fraction]] = {}
        limits = {number: number * self._limit(number) for number in range(1, self.most_groups + 1)}
        for number in limits:
            if groups := self._dealt(number):
                best[number] = groups, self._least(groups)
        bound = top = max((number * least for number, (_, least) in best.items()), default=Fraction(0))
        for number in sorted(limits, key=lambda n: (-limits[n], n)):
            if limits[number] <= top:
                break
            groups, unknown = self._improved(number, top / number)
            if groups is not None:
                best[number] = groups, self._least(groups)
                top = max(top, number * best[number][1])
            if unknown:
                bound = max(bound, Fraction(limits[number]))
        found = sorted(best.items(), key=lambda item: (-item[0] * item[1][1], item[0]))
        return [Grouping(self._with_rest(groups), least, max(bound, top)) for _, (groups, least) in found]

    def repeated(self, bound: Fraction) -> list[Grouping]:
        """The best groups of a part of the cluster that is searched fast, repeated; nothing if none fit."""
        times = -(-sum(kind.count for kind in self.kinds) // _FAST)
        part = _Search([replace(kind, count=kind.count // times) for kind in self.kinds], self.task)
        groups = next((one.groups * times for one in part.run()), ())
        groups = self._with_rest(groups)
        return [Grouping(groups, self._least(groups), bound)] if groups else []

    def bounded(self, found: Sequence[Grouping]) -> list[Grouping]:
        """The same with a smaller bound, where there are few enough kinds to find one."""
        if self.packing.is_too_large:
            return list(found)
        bound = Fraction(product_bound(self.kinds, self.task, float(found[0].product)))
        return [replace(one, bound=max(one.product, min(one.bound, bound))) for one in found]

    def _with_rest(self, groups: Groups) -> Groups:
        """The groups with the devices that are left, each where it makes the weakest group stronger."""
        if not groups:
            return ()
        filled = [list(group) for group in groups]
        k = self.task.microbatches
        for place in reversed(range(len(self.kinds))):
            for _ in range(self.kinds[place].count - sum(group[place] for group in groups)):
                weakest = min(filled, key=lambda group: (power_of(group, self.kinds, k), group))
                more = [n + (i == place) for i, n in enumerate(weakest)]
                if sum(more) > self.task.most_stages:
                    continue
                if power_of(more, self.kinds, k) >= power_of(weakest, self.kinds, k):
                    weakest[place] += 1
        return tuple(map(tuple, filled))

    def _least(self, groups: Sequence[Sequence[int]]) -> Fraction:
        return min(power_of(group, self.kinds, self.task.microbatches) for group in groups)

    def _fits(self, group: Sequence[int]) -> bool:
        memory = sum(kind.memory_bytes * n for kind, n in zip(self.kinds, group, strict=True))
        return memory >= self.task.memory_bytes and 1 <= sum(group) <= self.task.most_stages

    def _limit(self, number: int) -> int:
        """No so many groups have a larger least power, from the sum of the linear constraints."""
        k = self.task.microbatches
        low, high = 0, k * sum(kind.power * kind.count for kind in self.kinds) + 1
        while high - low > 1:
            z = (low + high) // 2
            room = sum(kind.count * max(kind.power * k - z, 0) for kind in self.kinds)
            low, high = (z, high) if room >= number * z * (k - 1) and room else (low, z)
        return low + 1

    def _dealt(self, number: int) -> Groups | None:
        """Groups of devices dealt out, the strongest first, each to the group with the least power."""
        groups = [[0] * len(self.kinds) for _ in range(number)]
        heap = [(0, i) for i in range(number)]
        for place in reversed(range(len(self.kinds))):
            kind = self.kinds[place]
            share, rest = (
                divmod(kind.count, number) if all(p == heap[0][0] for p, _ in heap) else (0, kind.count)
            )
            heap = [(power + share * kind.power, i) for power, i in heap]
            for group in groups:
                group[place] += share
            for _ in range(rest):
                power, i = heap[0]
                groups[i][place] += 1
                heapq.heapreplace(heap, (power + kind.power, i))
        dealt = tuple(sorted(self._without_excess(tuple(group)) for group in groups))
        return dealt if all(map(self._fits, dealt)) else None

    def _without_excess(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """A group without the weakest devices that are more than there are layers."""
        excess, kept = sum(group) - self.task.most_stages, list(group)
        for place, n in enumerate(kept):
            kept[place] -= min(n, max(excess, 0))
            excess -= n
        return tuple(kept)

    def _improved(self, number: int, floor: Fraction) -> tuple[Groups | None, bool]:
        """The best so many groups if all are stronger than a floor; and whether the search was cut short."""
        if self.packing.is_too_large:
            return None, True
        found, low = None, int(floor)
        high = self._limit(number)
        while low < high:
            z = low + 1 if found is None else (low + high + 1) // 2
            try:
                groups = self.packing.packed(smallest_groups(self.kinds, self.task, z), number)
            except OverflowError:
                return found, True
            if groups is None:
                high = z - 1
            else:
                found, low = groups, max(z, int(self._least(groups)))
        if found is not None and self._least(found) <= floor:
            found = None
        return found, False


# An upper bound on a grouping of unlike devices, where the exact search would take too long.
#
# Prices on devices bound the number of groups: if every group that reaches a power z costs at least m, then
# no more than (price of all devices) / m such groups exist. That is the dual of the linear programme over all
# groups. Any prices give a valid bound; those tried here are all combinations of a coarse grid. The product
# of number and power over a range [a, b] of powers is below (groups that reach a) times b; ranges whose bound
# is too large are halved.


def product_bound(kinds: Sequence[Kind], task: Task, known: float) -> float:
    """No grouping has a larger product of the number of groups and the least effective power.

    Args:
        kinds: of devices, the one with the most power last.
        task: the same for every group.
        known: a product that is reached, and so a bound below which no range matters.
    """
    counts = np.array([kind.count for kind in kinds], dtype=np.float64)
    prices = np.array(list(_grid(len(kinds))), dtype=np.float64)
    low = max(1.0, known / counts.sum())
    high = float(task.microbatches * sum(kind.power * kind.count for kind in kinds))
    ranges = [(-_groups(kinds, task, low, counts, prices) * high, low, high)]
    for _ in range(min(_RANGES, _ENTRIES // prod(kind.count + 1 for kind in kinds[:-1]))):
        bound, low, high = ranges[0]
        if -bound <= known * _ROUNDING or high / low < 1 + _CLOSE:
            break
        middle = (low * high) ** 0.5
        upper = -_groups(kinds, task, middle, counts, prices) * high
        lower = bound * (middle / high)  # as many groups, of less power
        heapq.heapreplace(ranges, (lower, low, middle))
        heapq.heappush(ranges, (upper, middle, high))
    return max(-ranges[0][0], known) * _ROUNDING


def _groups(
    kinds: Sequence[Kind],
    task: Task,
    power: float,
    counts: npt.NDArray[np.float64],
    prices: npt.NDArray[np.float64],
) -> int:
    """No more groups reach a power."""
    table = smallest_groups(kinds, task, int(power))
    groups = np.column_stack([np.argwhere(table < NONE), table[table < NONE]])
    if not len(groups):
        return 0
    least = (prices @ groups.T).min(axis=1)
    useful = least > 0
    return int(((prices @ counts)[useful] / least[useful]).min() * _ROUNDING)


def _grid(kinds: int) -> Iterator[tuple[int, ...]]:
    """Prices that add up to the same, in as many steps as there is time for."""
    steps = 1
    while _combinations(steps + 1, kinds) <= _PRICES and steps < _PRICES:
        steps += 1

    def rest(left: int, kinds: int) -> Iterator[tuple[int, ...]]:
        if kinds == 1:
            yield (left,)
            return
        for first in range(left + 1):
            yield from ((first, *others) for others in rest(left - first, kinds - 1))

    yield from rest(steps, kinds)


def _combinations(steps: int, kinds: int) -> int:
    count = 1
    for i in range(1, kinds):
        count = count * (steps + i) // i
    return count
