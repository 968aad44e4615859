"""Shares of a batch for schedules that divide microbatches into rounds, and so do not take every number.

Interleaved 1F1B and zero-bubble demand that a pipeline's microbatches are divided evenly by the number of its
rounds. More microbatches may even take less time. So shares are sets of numbers, not all up to a largest one:
what a set of pipelines can do in all is a sum of members of these sets, and a knapsack over nodes finds which
sums there are. A set of numbers is the bits of a whole number; adding one to all is a shift.

The time of the slowest pipeline is found from below: first by the bound of each share, then exactly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

from swift_ft.errors import UsageError
from swift_ft.planning.layout.pipeline_time import PipelineTime

_MOST_SHIFTS = 5_000_000
"""Shifts of 640 bits of one knapsack: about a second."""

_TimeOf = Callable[[PipelineTime, int], int]

_Shares = dict[int, list[int]]
"""By the size of a pipeline in nodes, the numbers of microbatches that it may take."""


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
    """Which sums of shares there are, for pipelines that use all nodes."""

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
