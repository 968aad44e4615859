"""All partitions that cost at most a little more than a lower bound, searched from both ends of the chain.

With the prices of a :class:`~swift_ft.planning.grouping.lagrange.Dual`, each group has an *excess*: what it
costs above the cheapest way through the same place. A partition then costs the bound, plus the excess of its
groups, plus the price of the bytes that it leaves unused. All of these are at least zero, so a partition
within ``slack`` of the bound uses only groups whose excess is below ``slack``: the core, a small part of the
N^2 / 2 groups. Labels (bytes, excess) grow over the core from both ends, dominated ones are dropped, and the
two halves are joined in the middle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swift_ft.planning.grouping.chain import FloatArray, IntArray
from swift_ft.planning.grouping.lagrange import PricedChain

_ROUNDING = 1e-14  # relative: what two sums along the chain may differ by

Int32Array = npt.NDArray[np.int32]
Terms = tuple[float, IntArray, IntArray]  # price per byte; bytes before each place; rank by size of group


class TooManyLabelsError(Exception):
    """The search within this slack would need more memory than it may have."""


@dataclass(frozen=True)
class Dive:
    """Makes a search narrow: of the labels at one place it keeps those whose bytes are nearest to an ideal.

    What is found is then good, but no proof.

    Attributes:
        middle: where the two sides meet.
        width: labels kept, by place, shape (N + 1,).
        ideal: bytes before each place that lead to the limit in the end, shape (N + 1,).
    """

    middle: int
    width: IntArray
    ideal: FloatArray


@dataclass(frozen=True)
class Limits:
    """The limits of a partition, and of the search for it.

    Attributes:
        size: bytes per iteration.
        rank: the sum over groups of ``rank_of[size of group]`` must be this; None where any will do.
        labels: labels kept at most.
        dive: keep few labels at each place; None for all.
    """

    size: int
    rank: int | None
    labels: int
    dive: Dive | None = None


@dataclass(frozen=True)
class Found:
    """The best partition within the slack: what it costs above the bound, and where its groups begin."""

    excess: float
    starts: tuple[int, ...]


@dataclass
class _Labels:
    """The undominated ways to one place, sorted by (rank, size)."""

    size: IntArray
    excess: FloatArray
    rank: IntArray


@dataclass(frozen=True)
class _Core:
    """Groups ``tail .. head - 1`` whose excess is within the slack; sorted by head."""

    places: IntArray
    rest: FloatArray  # by place: the least excess from there to the end
    tail: IntArray
    head: IntArray
    excess: FloatArray


def _core(priced: PricedChain, price: float, slack: float, ways: tuple[FloatArray, FloatArray]) -> _Core:
    to, fro = ways
    rest = np.maximum(to + fro - to[-1], 0.0)
    places = np.nonzero(rest <= slack)[0]
    window = priced.longest(price, slack)
    paid = to + price * priced.before
    tails, heads, excesses = [], [], []
    for j in places[1:].tolist():
        low = max(0, j - window)
        first, last = np.searchsorted(places, (low, j))
        tail = places[first:last]
        excess = paid[tail] + priced.edges_into(j, low)[tail - low] - to[j]
        near = np.nonzero(excess + rest[j] <= slack)[0]
        tails.append(tail[near])
        heads.append(np.full(len(near), j))
        excesses.append(np.maximum(excess[near], 0.0))
    return _Core(places, rest, np.concatenate(tails), np.concatenate(heads), np.concatenate(excesses))


class _Side:
    """Labels that grow from one end of the chain: forward over heads, or backward over tails."""

    def __init__(self, core: _Core, n: int, forward: bool) -> None:
        there, here = (core.tail, core.head) if forward else (core.head, core.tail)
        order = np.argsort(here, kind="stable")
        self.there, self.cost = there[order], core.excess[order]
        self.index = np.searchsorted(here[order], np.arange(n + 2))
        self.last_use = np.full(n + 1, -1 if forward else n + 1)
        (np.maximum if forward else np.minimum).at(self.last_use, there, here)
        self.forward, self.home, self.width = forward, 0 if forward else n, 1
        self.labels = {self.home: _Labels(np.zeros(1, np.int64), np.zeros(1), np.zeros(1, np.int64))}
        self.parents: dict[int, tuple[Int32Array, Int32Array]] = {}

    def edges(self, place: int) -> range:
        return range(int(self.index[place]), int(self.index[place + 1]))

    def trace(self, place: int, k: int) -> list[int]:
        """Places from ``place`` home, ``place`` included."""
        way = [place]
        while place != self.home:
            tails, ks = self.parents[place]
            place, k = int(tails[k]), int(ks[k])
            way.append(place)
        return way


def _undominated(size: IntArray, excess: FloatArray, rank: IntArray, price: float) -> IntArray:
    """Order by (rank, size), keeping a label only if it costs less than all smaller ones of its rank."""
    cost = excess - price * (size - size[0])
    order = np.lexsort((cost, size, rank))
    cost, sorted_rank = cost[order], rank[order]
    if sorted_rank[0] != sorted_rank[-1]:  # one falling step per rank keeps their running minima apart
        step = (float(cost.max()) - float(cost.min())) * 1.001 + 1e-300
        cost = cost - np.concatenate(([0], np.cumsum(np.diff(sorted_rank) != 0))) * step
    lowest = np.minimum.accumulate(cost)
    better = np.ones(len(cost), dtype=bool)
    better[1:] = cost[1:] < lowest[:-1]
    return order[better]


def search(
    priced: PricedChain,
    price: float,
    slack: float,
    ways: tuple[FloatArray, FloatArray],
    rank_of: IntArray,
    limits: Limits,
) -> Found | None:
    """The cheapest partition within the limits, if one costs at most ``slack`` more than the bound.

    Args:
        priced: the chain, its toll set.
        price: seconds per byte.
        slack: how far above the bound to look, seconds.
        ways: cheapest ways from the start and to the end, as :class:`PricedChain` finds them at ``price``.
        rank_of: rank by size of the group; zeros where ``limits.rank`` is None.
        limits: see :class:`Limits`.

    Raises:
        TooManyLabelsError: more than ``limits.labels`` labels.
    """
    slack += _ROUNDING * max(float(np.abs(way).max()) for way in ways)  # prices can grow beyond all costs
    n, core = priced.n, _core(priced, price, slack, ways)
    front, back = _Side(core, n, True), _Side(core, n, False)
    terms = (price, priced.bytes_before, rank_of)
    first, last, stored = 0, len(core.places) - 1, 0
    middle = int(np.searchsorted(core.places, limits.dive.middle)) if limits.dive else 0
    while last - first > 1:
        if first < middle if limits.dive else front.width <= back.width:
            first += 1
            place = int(core.places[first])
            stored += _grow(front, place, slack - float(core.rest[place]), terms, limits)
        else:
            last -= 1
            place = int(core.places[last])
            stored += _grow(back, place, slack, terms, limits)
        if stored > limits.labels:
            raise TooManyLabelsError
    return _join(front, back, core, int(core.places[first]), terms, limits)


def _grow(side: _Side, place: int, room: float, terms: Terms, limits: Limits) -> int:
    """Labels of ``place`` from those of the places before it (in the order of growth); how many there are."""
    price, bytes_before, rank_of = terms
    sizes, excesses, ranks, tails, ks = [], [], [], [], []
    for e in side.edges(place):
        there = int(side.there[e])
        known = side.labels.get(there)
        if known is None:
            continue
        size = known.size + bytes_before[there if side.forward else place]
        excess = known.excess + side.cost[e]
        fit = np.nonzero((excess <= room) & (size <= limits.size))[0]
        if len(fit):
            sizes.append(size[fit])
            excesses.append(excess[fit])
            ranks.append(known.rank[fit] + rank_of[abs(place - there)])
            tails.append(np.full(len(fit), there, np.int32))
            ks.append(fit.astype(np.int32))
        if side.last_use[there] == place:
            del side.labels[there]
    if not sizes:
        return 0
    size, excess, rank = np.concatenate(sizes), np.concatenate(excesses), np.concatenate(ranks)
    keep = np.arange(len(size)) if len(sizes) == 1 else _undominated(size, excess, rank, price)
    if limits.dive is not None:
        ideal = limits.dive.ideal[place]
        distance = np.abs(size[keep] - (ideal if side.forward else limits.size - ideal))
        keep = keep[_lowest(distance, int(limits.dive.width[place]))]
    side.labels[place] = _Labels(size[keep], excess[keep], rank[keep])
    side.parents[place] = (np.concatenate(tails)[keep], np.concatenate(ks)[keep])
    side.width = len(keep)
    return side.width


def _lowest(values: FloatArray, count: int) -> IntArray:
    """The indices of the ``count`` lowest values, ascending."""
    if len(values) <= count:
        return np.arange(len(values))
    return np.sort(np.argpartition(values, count)[:count])


def _join(front: _Side, back: _Side, core: _Core, cut: int, terms: Terms, limits: Limits) -> Found | None:
    """The best pair of a way to a place up to ``cut``, and from one after it, a group between them."""
    price, bytes_before, rank_of = terms
    best, ends = math.inf, (0, 0, 0, 0)
    crossing = np.nonzero((core.tail <= cut) & (core.head > cut))[0]
    for e in crossing.tolist():
        i, j = int(core.tail[e]), int(core.head[e])
        a, b = front.labels.get(i), back.labels.get(j)
        if a is None or b is None:
            continue
        for rank in np.unique(b.rank).tolist():
            low, high = np.searchsorted(b.rank, (rank, rank + 1))
            wanted = np.arange(len(a.rank))
            if limits.rank is not None:
                wanted = np.nonzero(a.rank == limits.rank - rank - rank_of[j - i])[0]
            spare = limits.size - bytes_before[i] - a.size[wanted]
            partner = np.searchsorted(b.size[low:high], spare, side="right") - 1
            ok = partner >= 0
            if not ok.any():
                continue
            wanted, partner, spare = wanted[ok], partner[ok] + low, spare[ok]
            total = a.excess[wanted] + core.excess[e] + b.excess[partner] + price * (spare - b.size[partner])
            k = int(total.argmin())
            if total[k] < best:
                best, ends = float(total[k]), (i, j, int(wanted[k]), int(partner[k]))
    if best == math.inf:
        return None
    i, j, k, m = ends
    return Found(best, (*reversed(front.trace(i, k)), *back.trace(j, m)[:-1]))
