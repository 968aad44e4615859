"""The set of pipelines that uses all nodes, and the microbatches of each (Oobleck, SOSP '23, §4.2).

The paper minimises the variance of the pipelines' times, with one number of microbatches per template. That
has often no solution. Here the slowest pipeline's time is the smallest possible, with one number per
pipeline: there is a solution wherever there are microbatches enough. The global batch never changes.

The smallest time is found by bisection. Whether some set of templates can do the batch in a given time is a
knapsack: each template takes its nodes and does as many microbatches as fit into the time. So no set has to
be looked at by itself, however many there are. Schedules that do not take every number of microbatches are
dealt with in ``rounds.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swift_ft.costs.schedule_orders import Schedule
from swift_ft.errors import UsageError
from swift_ft.planning.layout.pipeline_time import PipelineTime
from swift_ft.planning.layout.rounds import best_dealt


@dataclass(frozen=True, slots=True)
class Instantiation:
    """Pipelines that use all nodes.

    Attributes:
        nodes: of each pipeline, ascending.
        microbatches: one for each pipeline.
        iteration_ns: time of the slowest.
    """

    nodes: tuple[int, ...]
    microbatches: tuple[int, ...]
    iteration_ns: int


def count_sets(sizes: Sequence[int], nodes: int, fewest: int) -> int:
    """How many sets of templates use so many nodes with at least ``fewest`` pipelines (equation 5).

    Args:
        sizes: of the templates, in nodes.
        nodes: to use.
        fewest: pipelines.
    """
    ways = [[0] * (nodes + 1) for _ in range(fewest + 1)]  # by pipelines, `fewest` or more in the last; nodes
    ways[0][0] = 1
    for size in sizes:
        for used in range(size, nodes + 1):
            for count in range(1, fewest + 1):
                ways[count][used] += ways[count - 1][used - size]
            ways[fewest][used] += ways[fewest][used - size]
    return ways[fewest][nodes]


def best_instantiation(
    times: dict[int, PipelineTime], nodes: int, fewest: int, microbatches: int
) -> Instantiation:
    """The pipelines that use all nodes and do a global batch in the shortest time.

    Args:
        times: of the templates, by their number of nodes.
        nodes: to use.
        fewest: pipelines.
        microbatches: in the global batch.

    Raises:
        UsageError: if no set of templates uses all nodes, or the batch is too small.
    """
    if any(time.schedule in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE) for time in times.values()):
        dealt = best_dealt(times, nodes, fewest, microbatches)
        sizes, shares = (tuple(column) for column in zip(*dealt, strict=True))
        slowest = max(times[size].exact(share) for size, share in dealt)
        return Instantiation(sizes, shares, slowest)
    least = _pack(nodes, fewest, {size: -time.least for size, time in times.items()})
    if least is None:
        raise UsageError(
            f"no {fewest} or more pipelines of {', '.join(map(str, times))} nodes use {nodes} nodes exactly: "
            "tolerate fewer losses, or use another number of nodes"
        )
    needed = sum(times[size].least for size in least)
    if needed > microbatches:
        raise UsageError(
            f"a global batch of {microbatches} microbatches is {needed - microbatches} too small: "
            f"the pipelines need {needed}, one per stage"
        )
    search = _Search(times, nodes, fewest, microbatches)
    high = search.upper(least)
    low = search.smallest(0, high, exact=False)
    return search.dealt(search.smallest(low, high, exact=True))


class _Packed(NamedTuple):
    """A set of sizes: the sum of their values, the last one, and the set of the others."""

    value: int
    size: int = 0
    rest: _Packed | None = None


def _pack(nodes: int, fewest: int, values: dict[int, int]) -> tuple[int, ...] | None:
    """The sizes that use all nodes, are at least ``fewest``, and have the greatest sum of values."""
    if fewest > 1:  # of many nodes the best sizes are many anyway, and to find them is faster
        sizes = _pack(nodes, 1, values)
        if sizes is None or len(sizes) >= fewest:
            return sizes
    best: list[list[_Packed | None]] = [[None] * (nodes + 1) for _ in range(fewest + 1)]
    best[0][0] = _Packed(0)
    for size, value in sorted(values.items()):
        for used in range(size, nodes + 1):
            for count in range(1, fewest + 1):
                for before in (count - 1, count) if count == fewest else (count - 1,):
                    rest, old = best[before][used - size], best[count][used]
                    if rest is not None and (old is None or rest.value + value > old.value):
                        best[count][used] = _Packed(rest.value + value, size, rest)
    found, chosen = best[fewest][nodes], list[int]()
    if found is None:
        return None
    while found.rest is not None:
        chosen.append(found.size)
        found = found.rest
    return tuple(reversed(chosen))


class _Search:
    """Bisection over the time of the slowest pipeline."""

    def __init__(self, times: dict[int, PipelineTime], nodes: int, fewest: int, microbatches: int) -> None:
        self._times = times
        self._nodes = nodes
        self._fewest = fewest
        self._microbatches = microbatches

    def upper(self, sizes: Sequence[int]) -> int:
        """A time within which these pipelines do the batch."""
        shares = deal([self._times[size] for size in sizes], self._microbatches)
        return max(self._times[size].exact(share) for size, share in zip(sizes, shares, strict=True))

    def smallest(self, low: int, high: int, *, exact: bool) -> int:
        """The smallest time from ``low`` to ``high`` within which some set does the batch."""
        if self._set_within(low, exact):
            return low
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._set_within(middle, exact) else (middle + 1, high)
        return low

    def _set_within(self, time_ns: int, exact: bool) -> tuple[int, ...] | None:
        capacities = {}
        for size, time in self._times.items():
            within = time.exact_within if exact else time.bound_within
            capacity = within(time_ns, self._microbatches)
            if capacity:
                capacities[size] = capacity
        # No set does more than all nodes would at the rate of the best size.
        if all(done * self._nodes < self._microbatches * size for size, done in capacities.items()):
            return None
        sizes = _pack(self._nodes, self._fewest, capacities)
        return sizes if sizes and sum(capacities[size] for size in sizes) >= self._microbatches else None

    def dealt(self, time_ns: int) -> Instantiation:
        """The set that does the batch within a time."""
        sizes = self._set_within(time_ns, exact=True)
        assert sizes is not None, "the bisection ended at a time that is enough"
        times = [self._times[size] for size in sizes]
        shares = deal(times, self._microbatches)
        slowest = max(time.exact(share) for time, share in zip(times, shares, strict=True))
        return Instantiation(sizes, shares, slowest)


def deal(times: Sequence[PipelineTime], microbatches: int) -> tuple[int, ...]:
    """Deal microbatches to pipelines so that the slowest one takes as short as possible.

    Args:
        times: one for each pipeline.
        microbatches: in all.

    Returns:
        Microbatches of each: at least what its schedule demands. What is over is taken from the slowest, the
        last among equals.

    Raises:
        UsageError: if there are fewer than the schedules demand.
    """
    needed = sum(time.least for time in times)
    if needed > microbatches:
        raise UsageError(
            f"{microbatches} microbatches are {needed - microbatches} too few: the pipelines need {needed}"
        )
    alike = Counter(map(id, times))  # there are few templates, and many pipelines of each
    kinds = {id(time): time for time in times}
    even = -(-microbatches // len(times))
    low, high = 0, max(time.exact(max(even, time.least)) for time in kinds.values())
    while low < high:
        middle = (low + high) // 2
        feasible = all(time.exact(time.least) <= middle for time in kinds.values())
        within = (
            alike[kind] * (time.exact_within(middle, microbatches) or time.least)
            for kind, time in kinds.items()
        )
        low, high = (low, middle) if feasible and sum(within) >= microbatches else (middle + 1, high)
    most = {kind: time.exact_within(low, microbatches) for kind, time in kinds.items()}
    shares = [most[id(time)] for time in times]
    for _ in range(sum(shares) - microbatches):
        slowest = max(
            (one for one, time in enumerate(times) if shares[one] > time.least),
            key=lambda one: (times[one].exact(shares[one]), one),
        )
        shares[slowest] -= 1
    return tuple(shares)
