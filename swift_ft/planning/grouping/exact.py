"""The exact answer to §5.3: the partition within the budget that has the least expected replay.

The problem holds a knapsack in it, so no method is fast on every input. This one is exact whenever it
finishes, and says so when it had to stop (``Optimum.gap_s``):

1. the best price per byte gives a lower bound (:mod:`lagrange`);
2. a search through all partitions within a little slack of the bound (:mod:`frontier`), the slack growing
   until the best one found is inside it, which proves that none is better;
3. machines that are all alike leave a wide gap, because costs then come in steps. Partitions are divided into
   classes by such steps, and a second price gives each class a bound of its own (:mod:`classes`). Within a
   class either few partitions come near the bound, and the search ends, or very many reach it, and a narrow
   search with a direction finds one of those: what costs as little as the bound needs no search to prove it.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

import numpy as np

from swift_ft.planning.grouping.chain import Chain, IntArray
from swift_ft.planning.grouping.classes import ClassBound, Classes, rank_of_path
from swift_ft.planning.grouping.frontier import Dive, Found, Limits, TooManyLabelsError, search
from swift_ft.planning.grouping.lagrange import Dual, Partition, PricedChain, solve_dual

_ROUNDING = 1e-12  # relative: what sums of 10,000 float64 terms may be off by
_FIRST_SLACK, _GROWTH = 1e-4, 4.0  # of the known gap
_NARROW, _REACH = 256, 256  # labels at one place of a dive, but for so many places around its middle
# dives with a direction: tilt of the price of a byte; labels around the middle, and where that is
_DIVES = ((1.5, 40_000, 1 / 2), (4.0, 160_000, 1 / 2), (4.0, 160_000, 1 / 3), (1.5, 160_000, 2 / 3))
_FIRST_LABELS, _CLASS_LABELS = 3_000_000, 20_000_000
_CLASSES = 24


@dataclass(frozen=True)
class Optimum:
    """The best partition found.

    Attributes:
        starts: where its groups begin.
        cost: its expected seconds per replayed iteration.
        gap_s: how much better another could be at most; 0.0 when it is proven that none is (up to rounding).
    """

    starts: tuple[int, ...]
    cost: float
    gap_s: float


def optimal_partition(chain: Chain, limit: int) -> Optimum:
    """The partition of least expected replay that logs at most ``limit`` bytes per iteration."""
    step = int(np.gcd.reduce(chain.boundary)) if chain.n > 1 else 0
    limit = min(limit, int(chain.boundary.sum()))
    limit -= limit % step if step else 0
    priced = PricedChain(chain)
    dual = solve_dual(priced, limit)
    if dual.above is None:
        return Optimum(dual.below.starts, dual.below.cost, 0.0)
    no_rank = np.zeros(chain.n + 1, dtype=np.int64)
    plain = Limits(limit, None, _FIRST_LABELS)
    best = _dive(priced, dual, no_rank, plain)
    best, proven = _deepen(priced, dual.price, dual.bound, no_rank, plain, best)
    gap = best.cost - dual.bound
    if not proven and gap > _ROUNDING * best.cost:
        best, gap = _by_class(chain, dual, limit, best)
        proven = gap <= _ROUNDING * best.cost
    return Optimum(best.starts, best.cost, 0.0 if proven else gap)


def _dive(priced: PricedChain, dual: Dual, rank_of: IntArray, limits: Limits) -> Partition:
    """A narrow search among the cheapest ways: where many partitions are equally good, it finds one."""
    assert dual.above is not None
    below, above = priced.logged_before(dual.below), priced.logged_before(dual.above)
    dive = Dive(
        priced.n // 2, np.full(priced.n + 1, _NARROW), below + _mixture(dual, limits.size) * (above - below)
    )
    slack = 10 * _ROUNDING * dual.below.cost
    limits = replace(limits, labels=sys.maxsize, dive=dive)
    found = search(priced, dual.price, slack, priced.ways(dual.price), rank_of, limits)
    return _better(priced, found, dual.below)


def _deepen(
    priced: PricedChain, price: float, bound: float, rank_of: IntArray, limits: Limits, best: Partition
) -> tuple[Partition, bool]:
    """Search with growing slack; also whether nothing in the class can be better than the result."""
    ways = priced.ways(price)
    rounding = _ROUNDING * best.cost
    slack = 0.0
    while (gap := best.cost - bound) > slack + rounding:
        slack = max(min(slack * _GROWTH, gap), gap * _FIRST_SLACK, rounding)
        try:
            found = search(priced, price, slack + rounding, ways, rank_of, limits)
        except TooManyLabelsError:
            return best, False
        best = _better(priced, found, best)
    return best, True


def _better(priced: PricedChain, found: Found | None, best: Partition) -> Partition:
    path = priced.measure(found.starts) if found is not None else best
    return path if path.cost < best.cost else best


def _mixture(dual: Dual, limit: int) -> float:
    """The share of the path above the limit in the mixture of the dual's two paths that uses it exactly."""
    assert dual.above is not None
    return (limit - dual.below.size) / (dual.above.size - dual.below.size)


def _by_class(chain: Chain, dual: Dual, limit: int, best: Partition) -> tuple[Partition, float]:
    """Go through the classes from the most promising one outwards, until no other can hold a better
    partition.

    The bound of a class is convex in its rank, so once it passes the best known cost on one side, it has on
    all classes further out.
    """
    assert dual.above is not None
    classes = Classes(chain, limit, dual.price, (dual.below, dual.above))
    below, above = (rank_of_path(path, classes.rank_of, chain.n) for path in (dual.below, dual.above))
    centre = below + _mixture(dual, limit) * (above - below)
    open_bounds, done = [best.cost], 0
    for outward, rank in ((-1, math.floor(centre)), (1, math.floor(centre) + 1)):
        while True:
            within = classes.bound(rank, best.cost)
            if within.bound >= best.cost * (1 - _ROUNDING):
                break
            done += 1
            best, proven = _within(classes, within, rank, best)
            if not proven:
                open_bounds.append(within.bound)
            if done >= _CLASSES:
                return best, best.cost - dual.bound
            rank += outward
    return best, max(0.0, best.cost - min(open_bounds))


def _within(classes: Classes, within: ClassBound, rank: int, best: Partition) -> tuple[Partition, bool]:
    """The best of one class and of what is known; also whether nothing in the class can be better."""
    limits = Limits(classes.limit, rank, _FIRST_LABELS)
    best, proven = _deepen(within.priced, within.price, within.bound, classes.rank_of, limits, best)
    if proven:
        return best, True
    for number, (tilt, wide, share) in enumerate(_DIVES):
        leaning = classes.bound(rank, math.inf, within.price * tilt)
        dive = _leaning_dive(leaning, classes.limit, wide, round(share * classes.chain.n))
        best, proven = _lean(classes, leaning, within.bound, replace(limits, dive=dive), best, number == 0)
        if proven:
            return best, True
    return best, False


def _lean(
    classes: Classes, leaning: ClassBound, bound: float, dive: Limits, best: Partition, thorough: bool
) -> tuple[Partition, bool]:
    """The best of a class where very many partitions cost about what its bound says; whether it is proven.

    Where machines are alike, all partitions of the class that use the limit up to the last byte may cost the
    same, and a search at the prices of the bound has no direction. At a higher price for bytes it stays near
    those that log as little as any of the class can. A dive among these often finds one that logs all that it
    may, and so costs no more than the bound. Where there are too few for that, all of them can be searched.

    Args:
        leaning: the bound of the class at such a price.
        bound: its best one.
        dive: the narrow search.
        thorough: search all of them, if the dive does not meet the bound.
    """
    priced, ways, rank_of = leaning.priced, leaning.priced.ways(leaning.price), classes.rank_of
    rounding = _ROUNDING * best.cost
    limits, slack = replace(dive, labels=sys.maxsize), max(0.0, bound - leaning.bound) + rounding
    best = _better(priced, search(priced, leaning.price, slack, ways, rank_of, limits), best)
    if best.cost - bound <= rounding or not thorough:
        return best, best.cost - bound <= rounding
    limits, slack = replace(dive, labels=_CLASS_LABELS, dive=None), best.cost - leaning.bound + rounding
    try:
        return _better(priced, search(priced, leaning.price, slack, ways, rank_of, limits), best), True
    except TooManyLabelsError:
        return best, False


def _leaning_dive(leaning: ClassBound, limit: int, wide: int, middle: int) -> Dive:
    """Along the cheapest path, with all that it leaves of the limit to be used around the middle."""
    from_middle = np.arange(leaning.priced.n + 1) - middle
    width = np.where(np.abs(from_middle) <= _REACH, wide, _NARROW)
    unused = (limit - leaning.path.size) * np.clip(0.5 + from_middle / (2 * _REACH), 0.0, 1.0)
    return Dive(middle, width, leaning.priced.logged_before(leaning.path) + unused)
