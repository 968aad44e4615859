"""The exact answer to §5.3: the partition within the budget that has the least expected replay.

The problem holds a knapsack in it, so no method is fast on every input. This one is exact whenever it
finishes, and says so when it had to stop (``Optimum.gap_s``):

1. the best price per byte gives a lower bound (:mod:`lagrange`);
2. a search through all partitions within a little slack of the bound (:mod:`frontier`), the slack growing
   until the best one found is inside it, which proves that none is better;
3. machines that are all alike leave a wide gap, because costs then come in steps. Partitions are divided into
   classes by such steps, and a second price gives each class a bound of its own (below). Within a
   class either few partitions come near the bound, and the search ends, or very many reach it, and a narrow
   search with a direction finds one of those: what costs as little as the bound needs no search to prove it.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass, replace

import numpy as np

from swift_ft.planning.grouping.chain import Chain, FloatArray, IntArray
from swift_ft.planning.grouping.frontier import Dive, Found, Limits, TooManyLabelsError, search
from swift_ft.planning.grouping.lagrange import Dual, Partition, PricedChain, solve_dual

_ROUNDING = 1e-12  # relative: what sums of 10,000 float64 terms may be off by
_FIRST_SLACK, _GROWTH = 1e-4, 4.0  # of the known gap
_NARROW, _REACH = 256, 256  # labels at one place of a dive, but for so many places around its middle
# dives with a direction: tilt of the price of a byte; labels around the middle, and where that is
_DIVES = ((1.5, 40_000, 1 / 2), (4.0, 160_000, 1 / 2), (4.0, 160_000, 1 / 3), (1.5, 160_000, 2 / 3))
_FIRST_LABELS, _CLASS_LABELS = 3_000_000, 20_000_000
_CLASSES = 24


_ROUNDS = 60


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


# Partitions by class: prices per byte and per step of rank that bound one class from below.
#
# Machines that compute alike make costs come in steps: a partition's cost is mostly a matter of its *rank*,
# the sum over groups of a whole number that grows with the size of the group. Prices on bytes alone mix ranks
# and leave a gap of about a step; with a second price, the *toll* per step of rank, each rank has its own
# bound.


def ranks(chain: Chain) -> IntArray:
    """By group size: what identical machines cost above single ones, in units of a pair's."""
    sizes = np.arange(chain.n + 1, dtype=np.float64)
    alone = sizes * chain.share[1]
    grown = sizes * sizes * chain.share - alone
    unit = float(grown[2]) if chain.n > 1 else 1.0
    found: IntArray = np.rint(grown / unit).astype(np.int64)
    return found


def rank_of_path(path: Partition, rank_of: IntArray, n: int) -> int:
    """The sum of the ranks of a partition's groups."""
    return int(rank_of[np.diff([*path.starts, n])].sum())


@dataclass(frozen=True)
class ClassBound:
    """The best bound found for one class.

    Attributes:
        priced: the chain with the toll of the bound.
        price: seconds per byte.
        toll: seconds per step of rank.
        bound: no partition of the class within the limit costs less.
        path: a cheapest partition at these prices, of any rank and size.
    """

    priced: PricedChain
    price: float
    toll: float
    bound: float
    path: Partition


class Classes:
    """Bounds of one class after another; what one has learned about the chain serves the next.

    Every partition that was ever cheapest is a plane above the bound as a function of the prices (a cut). The
    next prices are where the lowest of these planes is highest (Kelley's method).

    Args:
        chain: the chain.
        limit: bytes per iteration that a partition may log.
        price: seconds per byte to begin with.
        known: partitions to begin with, on both sides of the limit.
    """

    def __init__(self, chain: Chain, limit: int, price: float, known: tuple[Partition, ...]) -> None:
        self.chain, self.limit = chain, limit
        self.rank_of = ranks(chain)
        self._price = price
        self._cuts: list[tuple[float, int, int]] = []  # cost, bytes, rank
        for path in known:
            self._learn(path)

    def bound(self, rank: int, enough: float, price: float | None = None) -> ClassBound:
        """The best bound for the class of ``rank``, or one of at least ``enough``.

        Args:
            rank: which class.
            enough: a bound above this closes the class: no need to go on.
            price: the bound at this price per byte only.
        """
        box = 4 * max(self._price, 1e-300), 4 * self._cuts[0][0] / self.chain.n
        best: ClassBound | None = None
        for _ in range(_ROUNDS):
            at, toll, at_wall = self._highest(rank, price, box)
            found, new = self._at(at, toll, rank)
            higher = best is None or found.bound > best.bound
            if best is None or higher:
                best = found
            if best.bound >= enough or not (new or (at_wall and higher)):
                break
            if at_wall:
                box = 8 * box[0], 8 * box[1]
        assert best is not None
        return best

    def _at(self, price: float, toll: float, rank: int) -> tuple[ClassBound, bool]:
        priced = PricedChain(self.chain, (toll * self.rank_of).astype(np.float64))
        path = priced.path(priced.forward(price)[1])
        new = self._learn(path)
        excess = price * (path.size - self.limit) + toll * (self._rank(path) - rank)
        bound = path.cost + excess - 1e-15 * abs(toll) * rank  # tolls can grow beyond all costs
        return ClassBound(priced, price, toll, bound, path), new

    def _rank(self, path: Partition) -> int:
        return rank_of_path(path, self.rank_of, self.chain.n)

    def _learn(self, path: Partition) -> bool:
        cut = (path.cost, path.size, self._rank(path))
        new = cut not in self._cuts
        if new:
            self._cuts.append(cut)
        return new

    def _highest(self, rank: int, price: float | None, box: tuple[float, float]) -> tuple[float, float, bool]:
        """The price and the toll where the lowest cut is highest, and whether that is a wall of the box."""
        cost, size, step = np.array(self._cuts, dtype=np.float64).T
        across, along = size - self.limit, step - rank
        slopes, most, least = np.stack((across, along), axis=1), np.array(box), np.array([0.0, -box[1]])
        if price is not None:
            cost, slopes, most, least = cost + price * across, slopes[:, 1:], most[1:], least[1:]
        scale = np.maximum(1.0, np.abs(slopes).max(axis=0))
        # unknowns: height, scaled prices; a row times these is at most the number beside it
        cuts = np.concatenate((np.ones((len(cost), 1)), -slopes / scale), axis=1)
        ways = np.eye(1 + len(scale))[1:]
        walls, stop = np.concatenate((-ways, ways)), np.concatenate((-least * scale, most * scale))
        active = [int((cost + (self._price * across if price is None else 0.0)).argmin())]
        while True:  # the lowest cut at the highest vertex joins those that the vertex is taken from
            rows, right = np.concatenate((cuts[active], walls)), np.concatenate((cost[active], stop))
            vertex, meeting = _highest_vertex(rows, right)
            lowest = int((cost - cuts[:, 1:] @ vertex[1:]).argmin())
            if lowest in active:
                break
            active.append(lowest)
        movable = meeting >= len(active) + (
            1 if price is None else 0
        )  # a price below zero is no matter of room
        prices = [float(value) for value in vertex[1:] / scale]
        at = max(0.0, prices[0]) if price is None else price
        return at, prices[-1], bool(movable.any())


def _highest_vertex(rows: FloatArray, right: FloatArray) -> tuple[FloatArray, IntArray]:
    """The vertex of ``rows @ x <= right`` with the largest ``x[0]``, and the rows that meet there.

    There are few rows, so all vertices are tried.
    """
    chosen = np.array(list(itertools.combinations(range(len(rows)), rows.shape[1])))
    matrix = rows[chosen]
    solvable = np.abs(np.linalg.det(matrix)) > 1e-14
    chosen, matrix = chosen[solvable], matrix[solvable]
    points: FloatArray = np.linalg.solve(matrix, right[chosen][..., None])[..., 0]
    size = np.abs(right) + np.where(rows[:, 0] == 0, np.abs(right).max(), 0.0)  # the wall at 0 has none
    over = (points @ rows.T - right) / (np.abs(points) @ np.abs(rows).T + size + 1e-300)
    outside = over.max(axis=1)
    k = int(np.where(outside <= max(1e-12, float(outside.min())), points[:, 0], -math.inf).argmax())
    return points[k], chosen[k]
