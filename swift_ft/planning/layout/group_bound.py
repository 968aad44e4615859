"""An upper bound on a grouping of unlike devices, where the exact search would take too long. Pure.

Prices on devices bound the number of groups: if every group that reaches a power z costs at least m, then no
more than (price of all devices) / m such groups exist. That is the dual of the linear programme over all
groups. Any prices give a valid bound; those tried here are all combinations of a coarse grid. The product of
number and power over a range [a, b] of powers is below (groups that reach a) times b; ranges whose bound is
too large are halved.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from swift_ft.planning.layout.group_tables import NONE, Kind, Task, smallest_groups

_PRICES = 2000  # combinations that are tried, about
_RANGES = 200  # of powers that are looked at, fewer where tables are large
_ENTRIES = 40_000_000  # of all tables together
_CLOSE = 1e-4  # relative width of a range that is not halved any more
_ROUNDING = 1 + 1e-9  # floats are off by less


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
