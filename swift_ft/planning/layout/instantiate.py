"""The set of pipelines that uses all nodes, and the microbatches of each (Oobleck, SOSP '23, §4.2).

The paper minimises the variance of the pipelines' times, with one number of microbatches per template. That
has often no solution. Here the slowest pipeline's time is the smallest possible, with one number per
pipeline: there is a solution wherever there are microbatches enough. The global batch never changes.

The smallest time is found by bisection. Whether some set of templates can do the batch in a given time is a
knapsack: each template takes its nodes and does as many microbatches as fit into the time. So no set has to
be looked at by itself, however many there are. Schedules that do not take every number of microbatches are
dealt with at the end of this file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swift_ft.costs.schedule_orders import Schedule
from swift_ft.errors import UsageError
from swift_ft.planning.layout.pipeline_time import PipelineTime

_MOST_SHIFTS = 5_000_000
"""Shifts of 640 bits of one knapsack: about a second."""

_TimeOf = Callable[[PipelineTime, int], int]

_Shares = dict[int, list[int]]
"""By the size of a pipeline in nodes, the numbers of microbatches that it may take."""


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
    """The number of sets of templates that use so many nodes with at least ``fewest`` pipelines (equation 5).

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


# Shares of a batch for schedules that divide microbatches into rounds, and so do not take every number.
#
# Interleaved 1F1B and zero-bubble demand that a pipeline's microbatches are divided evenly by the number of
# its rounds. More microbatches may even take less time. So shares are sets of numbers, not all up to a
# largest one: what a set of pipelines can do in all is a sum of members of these sets, and a knapsack over
# nodes finds which sums there are. A set of numbers is the bits of a whole number; adding one to all is a
# shift.
#
# The time of the slowest pipeline is found from below: first by the bound of each share, then exactly.


def best_dealt(
    times: Mapping[int, PipelineTime], nodes: int, fewest: int, microbatches: int
) -> list[tuple[int, int]]:
    """The pipelines that use all nodes and do exactly a global batch in the shortest time.

    Args:
        times: of the templates, by their number of nodes.
        nodes: to use.
        fewest: pipelines.
        microbatches: in the global batch.

    Returns:
        Of each pipeline its nodes and its microbatches, ascending.

    Raises:
        UsageError: if no set of templates uses all nodes, or none can do exactly this batch.
    """
    allowed = {size: time.counts(microbatches) for size, time in times.items()}
    if nodes * fewest * sum(map(len, allowed.values())) * (microbatches // 640 + 1) > _MOST_SHIFTS:
        raise UsageError(
            f"{nodes} nodes and {microbatches} microbatches are too many to plan for with a schedule that "
            "does not take every number of microbatches: use 1f1b or gpipe"
        )
    everything = _Knapsack(allowed, nodes, fewest, microbatches)
    if not everything.has(microbatches):
        raise UsageError(_why_not(everything, allowed, nodes, fewest, microbatches))

    def knapsack(time_ns: int, time_of: _TimeOf) -> _Knapsack:
        fast = {
            size: [n for n in shares if _is_within(times[size], n, time_ns, time_of)]
            for size, shares in allowed.items()
        }
        return _Knapsack(fast, nodes, fewest, microbatches)

    def least(low: int, high: int | None, time_of: _TimeOf) -> int:
        """The shortest time, from ``low`` on, that is enough; ``high`` is, where there is one."""
        found = sorted(
            time_ns
            for size, shares in allowed.items()
            for n in shares
            if high is None or times[size].bound(n) <= high
            if low <= (time_ns := time_of(times[size], n)) and (high is None or time_ns <= high)
        )
        return found[bisect_left(found, True, key=lambda t: knapsack(t, time_of).has(microbatches))]

    low = least(0, None, PipelineTime.bound)
    high = low
    while not knapsack(high, PipelineTime.exact).has(microbatches):
        high += high // 4 + 1
    best = least(low, high, PipelineTime.exact)
    return knapsack(best, PipelineTime.exact).unpacked(microbatches)


def _is_within(time: PipelineTime, share: int, time_ns: int, time_of: _TimeOf) -> bool:
    """Whether a pipeline does its share within a time. The bound is asked first: it is found faster."""
    return time.bound(share) <= time_ns and time_of(time, share) <= time_ns


class _Knapsack:
    """The sums of shares that are possible, for pipelines that use all nodes."""

    def __init__(self, shares: _Shares, nodes: int, fewest: int, microbatches: int) -> None:
        self._shares = shares
        self._nodes, self._fewest = nodes, fewest
        self._mask = (1 << microbatches + 1) - 1
        # By pipelines, `fewest` or more in the last, and by nodes used: the sums, as bits.
        self._sums = [[0] * (nodes + 1) for _ in range(fewest + 1)]
        self._sums[0][0] = 1
        for used in range(1, nodes + 1):
            for count in range(1, fewest + 1):
                self._sums[count][used] = self._of(count, used)

    def _of(self, count: int, used: int) -> int:
        sums = 0
        for size, shares in self._shares.items():
            before = self._before(count, used - size) if size <= used else 0
            if before:
                for share in shares:
                    sums |= before << share
        return sums & self._mask

    def _before(self, count: int, used: int) -> int:
        """The sums to which one more pipeline makes so many."""
        before = self._sums[count - 1][used]
        return before | self._sums[count][used] if count == self._fewest else before

    @property
    def sums(self) -> int:
        """All sums, as bits."""
        return self._sums[self._fewest][self._nodes]

    def has(self, total: int) -> bool:
        """Whether some pipelines do exactly so many microbatches."""
        return bool(self.sums >> total & 1)

    def unpacked(self, total: int) -> list[tuple[int, int]]:
        """The pipelines of a sum."""
        found, count, used = [], self._fewest, self._nodes
        while used:
            size, share = next(
                (size, share)
                for size, shares in self._shares.items()
                if size <= used
                for share in shares
                if share <= total and self._before(count, used - size) >> (total - share) & 1
            )
            found.append((size, share))
            used, total = used - size, total - share
            if count < self._fewest or not self._sums[count][used] >> total & 1:
                count -= 1
        return sorted(found)


def _why_not(everything: _Knapsack, allowed: _Shares, nodes: int, fewest: int, microbatches: int) -> str:
    names = ", ".join(map(str, allowed))
    if not everything.sums:
        larger = _Knapsack({size: [1] for size in allowed}, nodes, fewest, nodes)
        if not larger.sums:
            return (
                f"no {fewest} or more pipelines of {names} nodes use {nodes} nodes exactly: tolerate fewer "
                "losses, or use another number of nodes"
            )
        return f"a global batch of {microbatches} microbatches is too small: some pipelines would have none"
    nearest = everything.sums.bit_length() - 1
    return (
        f"no pipelines of {names} nodes can do exactly {microbatches} microbatches: the schedule divides "
        f"them into rounds; {nearest} would do"
    )
