"""Cheapest partitions when a logged byte has a price: the relaxation that the exact search stands on.

With a price of ``price`` seconds per logged byte, the best partition of a chain into groups is a shortest
path over the N + 1 places where a group can begin or end. It needs nothing from the costs (no Monge
property, which parallel recovery does not have), only that a group which is dearer than its machines alone,
all boundaries paid, is never taken; that bounds how long a group can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swift_ft.planning.grouping.chain import Chain, FloatArray, IntArray


@dataclass(frozen=True)
class Partition:
    """A partition: where its groups begin, and its cost and bytes per iteration."""

    starts: tuple[int, ...]
    cost: float
    size: int


class PricedChain:
    """Shortest paths over a chain of machines at one price per byte after another.

    Args:
        chain: costs of groups.
        toll: a further charge by size of the group, shape (N + 1,), which the search uses to stay in one
            class of partitions; zero for single machines, and where it is not given.
    """

    def __init__(self, chain: Chain, toll: FloatArray | None = None) -> None:
        # toll[1] == 0: longest() compares with machines alone, which pay none
        self.chain = chain
        self.n = chain.n
        self._toll = toll
        self.bytes_before: IntArray = np.concatenate(
            ([0], chain.boundary, [0])
        )  # over the boundary before place i
        self.before = self.bytes_before.astype(np.float64)
        self._scale_rev = chain.share[::-1].copy() if chain.parallel else None
        self._toll_rev = None if toll is None else toll[::-1].copy()
        self._low_chance = _window_bound(chain.probability, np.minimum)
        self._low_time = _window_bound(np.diff(chain._cum_compute), np.minimum)
        alone = chain.probability * np.array(chain.profile.compute_s) * chain.share[1]
        self._high_alone = _window_bound(alone, np.maximum)
        self._high_bytes = _window_bound(np.concatenate((chain.boundary, [0])).astype(np.float64), np.maximum)

    def longest(self, price: float, slack: float) -> int:
        """No group longer than this lies on a path within ``slack`` of the best."""
        least = self._low_chance * self._low_time * self.chain.share
        if self._toll is not None:
            least = least + self._toll
        apart = self._high_alone + price * self._high_bytes
        fits = np.nonzero(least <= apart * (1 + 1e-9) + slack)[0]
        return int(fits[-1]) if len(fits) else 1

    def edges_into(self, j: int, low: int) -> FloatArray:
        """Costs of the groups ``i .. j - 1`` for ``i`` from ``low`` to ``j - 1``."""
        chain = self.chain
        cost: FloatArray = chain.cum_probability[j] - chain.cum_probability[low:j]
        cost *= chain.end_time[j] - chain.start_time[low:j]
        if self._scale_rev is not None:
            cost *= self._scale_rev[self.n - j + low : self.n]
        if self._toll_rev is not None:
            cost += self._toll_rev[self.n - j + low : self.n]
        return cost

    def edges_from(self, i: int, high: int) -> FloatArray:
        """Costs of the groups ``i .. j - 1`` for ``j`` from ``i + 1`` to ``high``."""
        chain = self.chain
        cost: FloatArray = chain.cum_probability[i + 1 : high + 1] - chain.cum_probability[i]
        cost *= chain.end_time[i + 1 : high + 1] - chain.start_time[i]
        if self._scale_rev is not None:
            cost *= chain.share[1 : high - i + 1]
        if self._toll is not None:
            cost += self._toll[1 : high - i + 1]
        return cost

    def forward(self, price: float) -> tuple[FloatArray, IntArray]:
        """The cheapest way to each place, and the place before it on that way."""
        n, window = self.n, self.longest(price, 0.0)
        best, came = np.zeros(n + 1), np.zeros(n + 1, dtype=np.int64)
        paid = np.zeros(n + 1)
        tolls = price * self.before
        for j in range(1, n + 1):
            low = max(0, j - window)
            total = self.edges_into(j, low)
            total += paid[low:j]
            k = int(total.argmin())
            best[j] = total[k]
            came[j] = low + k
            paid[j] = best[j] + tolls[j]
        return best, came

    def backward(self, price: float) -> FloatArray:
        """The cheapest way from each place to the end; the boundary before that place is paid."""
        n, window = self.n, self.longest(price, 0.0)
        best = np.zeros(n + 1)
        tolls = price * self.before
        for i in range(n - 1, -1, -1):
            high = min(n, i + window)
            total = self.edges_from(i, high)
            total += best[i + 1 : high + 1]
            best[i] = total.min() + tolls[i]
        return best

    def ways(self, price: float) -> tuple[FloatArray, FloatArray]:
        """The costs of the cheapest ways to each place, and from each place to the end."""
        return self.forward(price)[0], self.backward(price)

    def logged_before(self, path: Partition) -> FloatArray:
        """Bytes that a partition logs before each place, shape (N + 1,)."""
        logged = np.zeros(self.n + 1)
        starts = np.array(path.starts)
        logged[starts] = self.before[starts]
        total: FloatArray = np.cumsum(logged) - logged
        return total

    def path(self, came: IntArray) -> Partition:
        """The partition that :meth:`forward` found."""
        starts, place = [], self.n
        while place > 0:
            place = int(came[place])
            starts.append(place)
        starts.reverse()
        return self.measure(starts)

    def measure(self, starts: Sequence[int]) -> Partition:
        """Cost and bytes of a partition; the toll counts for finding paths, not for what they cost."""
        return Partition(tuple(starts), self.chain.expected_replay_s(starts), self.chain.logged_bytes(starts))

    def toll_of(self, path: Partition) -> float:
        """The sum of the tolls that the groups of a partition pay."""
        if self._toll is None:
            return 0.0
        return float(self._toll[np.diff([*path.starts, self.n])].sum())


def _window_bound(values: FloatArray, pick: np.ufunc) -> FloatArray:
    """Bounds, by length, on the sum over any window: exact for powers of two, added up in between."""
    n = len(values)
    bound = np.zeros(n + 1)
    sums, length = values.astype(np.float64), 1
    extremes: dict[int, float] = {}
    while length <= n:
        extremes[length] = float(pick.reduce(sums))
        if 2 * length <= n:
            sums = sums[: n - 2 * length + 1] + sums[length : n - length + 1]
        length *= 2
    for length, extreme in extremes.items():
        upto = min(2 * length, n + 1)
        bound[length:upto] = extreme + bound[: upto - length]
    return bound


@dataclass(frozen=True)
class Dual:
    """The best lower bound that a price on bytes gives.

    Attributes:
        price: seconds per byte.
        bound: no partition within the limit costs less.
        above: a path at that price that breaks the limit, None where there is none.
        below: one that keeps it.
    """

    price: float
    bound: float
    above: Partition | None
    below: Partition


def solve_dual(priced: PricedChain, limit: int) -> Dual:
    """The price at which cheapest paths lie on both sides of ``limit`` bytes per iteration.

    Each round takes the price at which the two known paths cost the same; when nothing is cheaper than they
    are at that price, it is the best one. The number of rounds is that of the breakpoints met, some ten.
    """
    above, below = priced.measure(range(priced.n)), priced.measure((0,))
    if above.size <= limit:
        return Dual(0.0, above.cost, None, above)
    dear, cheap = below.cost + priced.toll_of(below), above.cost + priced.toll_of(above)
    while True:
        price = max(0.0, (dear - cheap) / (above.size - below.size))
        best, came = priced.forward(price)
        found = priced.path(came)
        known, value = dear + price * below.size, float(best[-1])
        if value >= known - 1e-12 * abs(known) or found in (above, below):
            return Dual(price, min(value, known) - price * limit, above, below)
        if found.size > limit:
            above, cheap = found, found.cost + priced.toll_of(found)
        else:
            below, dear = found, found.cost + priced.toll_of(found)
