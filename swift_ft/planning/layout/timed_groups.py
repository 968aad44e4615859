"""Groups of unlike devices by the time that their pipelines take, where all can be timed. Pure.

AutoHet's effective power (``device_groups.py``) does not know that a stage has whole layers. Here the layers
of every group that there may be are dealt, and for each number of groups the least time is sought within
which so many disjoint groups exist. No grouping has a faster slowest pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod

import numpy as np

from swift_ft.planning.layout.group_packing import Groups, Packing
from swift_ft.planning.layout.group_tables import NONE, Table, frontier

_MOST_GROUPS = 120
_OPERATIONS = 100_000_000  # well below a second

Group = tuple[int, ...]


def can_time_all(counts: Sequence[int]) -> bool:
    """Whether there are few enough groups.

    Args:
        counts: one for each kind of device.
    """
    return prod(count + 1 for count in counts) <= _MOST_GROUPS


def fastest_groups(
    counts: Sequence[int], most_devices: int, time_of: Callable[[Group], int | None]
) -> list[Groups]:
    """For each number of groups those whose slowest one is fastest.

    Args:
        counts: one for each kind of device.
        most_devices: per group.
        time_of: a group's time, in any unit; None if it cannot hold the model.

    Returns:
        The first has one group, the last as many as there can be. Devices that make no pipeline faster are
        left over.
    """
    times = {
        group: time_ns
        for group in product(*(range(count + 1) for count in counts))
        if 1 <= sum(group) <= most_devices and (time_ns := time_of(group)) is not None
    }
    limits = sorted(set(times.values()))
    packing = Packing(counts, _OPERATIONS)
    found: list[Groups] = []
    low = 0  # more groups are not faster than fewer
    while low < len(limits):
        best, high = None, len(limits)
        while low < high:
            middle = (low + high) // 2
            groups = packing.packed(_smallest(times, limits[middle], counts), len(found) + 1)
            if groups is None:
                low = middle + 1
            else:
                best, high = groups, middle
        if best is None:
            break
        found.append(_with_rest(best, times, counts))
    return found


def _with_rest(groups: Groups, times: dict[Group, int], counts: Sequence[int]) -> Groups:
    """The groups, the fastest first, with those of the devices that are left that make one faster."""
    filled = [*groups]
    for kind in reversed(range(len(counts))):
        for _ in range(counts[kind] - sum(group[kind] for group in groups)):
            more = [(*group[:kind], group[kind] + 1, *group[kind + 1 :]) for group in filled]
            gains = [times[old] - times.get(new, times[old]) for old, new in zip(filled, more, strict=True)]
            best = max(range(len(filled)), key=gains.__getitem__)
            if gains[best] > 0:
                filled[best] = more[best]
    return tuple(sorted(filled, key=lambda group: (times[group], group)))


def _smallest(times: dict[Group, int], limit: int, counts: Sequence[int]) -> Table:
    """For each count of the weaker kinds, how many of the strongest a group within a time needs."""
    table = np.full([count + 1 for count in counts[:-1]], NONE, dtype=np.int64)
    for group, time_ns in times.items():
        if time_ns <= limit:
            at = group[:-1]
            table[at] = min(int(table[at]), group[-1])
    return frontier(table)
