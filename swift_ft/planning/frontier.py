"""All partitions that cost at most a little more than a lower bound, searched from both ends of the chain.

With the prices of a :class:`~swift_ft.planning.lagrange.Dual`, each group has an *excess*: what it costs above the
cheapest way through the same place. A partition then costs the bound, plus the excess of its groups, plus the price
of the bytes that it leaves unused. All of these are at least zero, so a partition within ``slack`` of the bound uses
only groups whose excess is below ``slack``: the core, a small part of the N^2 / 2 groups. Labels (bytes, excess)
grow over the core from both ends, dominated ones are dropped, and the two halves are joined in the middle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swift_ft.planning.chain import FloatArray, IntArray
from swift_ft.planning.lagrange import PricedChain

__all__ = ["Found", "Limits", "TooManyLabelsError", "search"]

Int32Array = npt.NDArray[np.int32]


class TooManyLabelsError(Exception):
    """The search within this slack would need more memory than it may have."""


@dataclass(frozen=True)
class Limits:
    """What a partition must keep.

    Attributes:
        size: bytes per iteration.
        rank: the sum over groups of ``rank_of[size of group]`` must be this; None where any will do.
        labels: labels kept at most.
    """

    size: int
    rank: int | None
    labels: int


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
    """Labels that grow from one end of the chain."""

    def __init__(self, home: int, edges: tuple[IntArray, IntArray, FloatArray], n: int) -> None:
        there, here, self.cost = edges  # an edge leads from a place ``there``, done before, to a place ``here``
        self.there = there
        self.index = np.searchsorted(here, np.arange(n + 2))
        self.labels = {home: _Labels(np.zeros(1, np.int64), np.zeros(1), np.zeros(1, np.int64))}
        self.parents: dict[int, tuple[Int32Array, Int32Array]] = {}
        self.home, self.width = home, 1
        self.last_use = np.full(n + 1, -1)
        self.last_use[there] = here  # edges are sorted by ``here`` in the order of growth: the last one stays

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
    n, core = priced.n, _core(priced, price, slack, ways)
    front = _Side(0, (core.tail, core.head, core.excess), n)
    order = np.lexsort((-core.head, -core.tail))
    back_here, back_there = core.tail[order], core.head[order]
    back = _Side(n, (back_there, back_here, core.excess[order]), n)
    ascending = np.argsort(core.tail, kind="stable")  # the index by place needs ascending order
    back.there, back.cost = core.head[ascending], core.excess[ascending]
    back.index = np.searchsorted(core.tail[ascending], np.arange(n + 2))
    first, last, stored = 0, len(core.places) - 1, 0
    bytes_before = priced.bytes_before
    while last - first > 1:
        if front.width <= back.width:
            first += 1
            place = int(core.places[first])
            _grow(front, place, price, slack - float(core.rest[place]), (bytes_before, True), rank_of, limits.size)
            stored += front.width
        else:
            last -= 1
            place = int(core.places[last])
            _grow(back, place, price, slack, (bytes_before, False), rank_of, limits.size)
            stored += back.width
        if stored > limits.labels:
            raise TooManyLabelsError
    return _join(front, back, core, int(core.places[first]), (price, bytes_before, rank_of), limits)


def _grow(
    side: _Side,
    place: int,
    price: float,
    room: float,
    direction: tuple[IntArray, bool],
    rank_of: IntArray,
    size_limit: int,
) -> None:
    """Labels of ``place`` from those of the places before it (in the order of growth)."""
    bytes_before, forward = direction
    sizes, excesses, ranks, tails, ks = [], [], [], [], []
    for e in side.edges(place):
        there = int(side.there[e])
        known = side.labels.get(there)
        if known is None:
            continue
        size = known.size + bytes_before[there if forward else place]
        excess = known.excess + side.cost[e]
        fit = np.nonzero((excess <= room) & (size <= size_limit))[0]
        if len(fit):
            sizes.append(size[fit])
            excesses.append(excess[fit])
            ranks.append(known.rank[fit] + rank_of[abs(place - there)])
            tails.append(np.full(len(fit), there, np.int32))
            ks.append(fit.astype(np.int32))
        if side.last_use[there] == place:
            del side.labels[there]
    if not sizes:
        return
    if len(sizes) == 1:
        labels, tail, k = _Labels(sizes[0], excesses[0], ranks[0]), tails[0], ks[0]
    else:
        size, excess, rank = np.concatenate(sizes), np.concatenate(excesses), np.concatenate(ranks)
        keep = _undominated(size, excess, rank, price)
        labels = _Labels(size[keep], excess[keep], rank[keep])
        tail, k = np.concatenate(tails)[keep], np.concatenate(ks)[keep]
    side.labels[place], side.parents[place], side.width = labels, (tail, k), len(tail)


def _join(
    front: _Side, back: _Side, core: _Core, cut: int, terms: tuple[float, IntArray, IntArray], limits: Limits
) -> Found | None:
    """The best pair of a way to a place up to ``cut`` and a way from one after it, with a group between them."""
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
