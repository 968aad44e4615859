"""The exact answer to §5.3: the partition within the budget that has the least expected replay.

The problem holds a knapsack in it, so no method is fast on every input. This one is exact whenever it
finishes, and says so when it had to stop (``Optimum.gap_s``):

1. the best price per byte gives a lower bound (:mod:`lagrange`);
2. a search through all partitions within a little slack of the bound (:mod:`frontier`), the slack growing
   until the best one found is inside it, which proves that none is better;
3. machines that are all alike leave a wide gap, because costs then come in steps. Partitions are divided into
   classes by such steps, and a second price keeps each search within one class, where the gap is small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from swift_ft.planning.chain import Chain, FloatArray, IntArray
from swift_ft.planning.frontier import Limits, TooManyLabelsError, search
from swift_ft.planning.lagrange import Dual, Path, PricedChain, solve_dual

__all__ = ["Optimum", "optimal_partition"]

_ROUNDING = 1e-12  # relative: what sums of 10,000 float64 terms may be off by
_FIRST_SLACK, _GROWTH = 1e-4, 4.0  # of the known gap
_DIVE_WIDTH = 256
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
    best, proven = _deepen(priced, dual, no_rank, Limits(limit, None, _FIRST_LABELS), dual.below)
    gap = best.cost - dual.bound
    if not proven and gap > _ROUNDING * best.cost:
        best, gap = _by_class(chain, dual, limit, best)
        proven = gap <= _ROUNDING * best.cost
    return Optimum(best.starts, best.cost, 0.0 if proven else gap)


def _deepen(
    priced: PricedChain, dual: Dual, rank_of: IntArray, limits: Limits, best: Path
) -> tuple[Path, bool]:
    """Search with growing slack; also whether nothing in the class can be better than the result."""
    to, _ = priced.forward(dual.price)
    ways = (to, priced.backward(dual.price))
    rounding = _ROUNDING * best.cost
    dive = replace(limits, width=_DIVE_WIDTH, ideal=_ideal(dual, priced, limits.size))
    slack, effort = 10 * rounding, dive  # where many partitions are equally good, a narrow search finds one
    while True:
        try:
            found = search(priced, dual.price, slack + rounding, ways, rank_of, effort)
        except TooManyLabelsError:
            return best, False
        if found is not None:
            path = priced.measure(found.starts)
            best = path if path.cost < best.cost else best
        gap = best.cost - dual.bound
        if gap <= rounding or (gap <= slack + rounding and effort is limits):
            return best, True
        slack = gap * _FIRST_SLACK if effort is dive else min(slack * _GROWTH, gap)
        slack, effort = max(slack, rounding), limits


def _ideal(dual: Dual, priced: PricedChain, limit: int) -> FloatArray:
    """Bytes before each place on the mixture of the dual's two paths that ends at the limit."""

    def profile(path: Path) -> FloatArray:
        logged = np.zeros(priced.n + 1)
        starts = np.array(path.starts)
        logged[starts] = priced.before[starts]
        total: FloatArray = np.cumsum(logged) - logged
        return total

    if dual.above is None:
        return profile(dual.below)
    part = (limit - dual.below.size) / (dual.above.size - dual.below.size)
    return profile(dual.below) + part * (profile(dual.above) - profile(dual.below))


def _ranks(chain: Chain) -> IntArray:
    """By group size: what identical machines cost above single ones, in units of a pair's."""
    sizes = np.arange(chain.n + 1, dtype=np.float64)
    alone = sizes * chain.share[1]
    grown = sizes * sizes * chain.share - alone
    unit = float(grown[2]) if chain.n > 1 else 1.0
    ranks: IntArray = np.rint(grown / unit).astype(np.int64)
    return ranks


def _by_class(chain: Chain, dual: Dual, limit: int, best: Path) -> tuple[Path, float]:
    """Go through the classes from the most promising one outwards, until no other can hold a better
    partition.

    The bound of a class is convex in its rank, so once it passes the best known cost on one side, it has on
    all classes further out.
    """
    rank_of = _ranks(chain)
    centre = _mixed_rank(dual, rank_of, chain.n, limit)
    open_bounds, done = [best.cost], 0
    for outward, rank in ((-1, math.floor(centre)), (1, math.floor(centre) + 1)):
        toll = 0.0
        while True:
            priced, within, toll = _class_dual(chain, rank_of, rank, limit, toll, best.cost)
            if within.bound >= best.cost * (1 - _ROUNDING):
                break
            done += 1
            best, proven = _deepen(priced, within, rank_of, Limits(limit, rank, _CLASS_LABELS), best)
            if not proven:
                open_bounds.append(within.bound)
            if done >= _CLASSES:
                return best, best.cost - dual.bound
            rank += outward
    return best, max(0.0, best.cost - min(open_bounds))


def _mixed_rank(dual: Dual, rank_of: IntArray, n: int, limit: int) -> float:
    """The rank of the mixture of the dual's two paths that uses the limit exactly."""
    below = _rank(dual.below, rank_of, n)
    if dual.above is None:
        return float(below)
    part = (limit - dual.below.size) / (dual.above.size - dual.below.size)
    return below + part * (_rank(dual.above, rank_of, n) - below)


def _rank(path: Path, rank_of: IntArray, n: int) -> int:
    starts = np.array([*path.starts, n])
    return int(rank_of[np.diff(starts)].sum())


def _class_dual(
    chain: Chain, rank_of: IntArray, rank: int, limit: int, toll: float, enough: float
) -> tuple[PricedChain, Dual, float]:
    """The best bound for the partitions of one rank: prices per byte and per step of rank.

    The bound is concave in the toll, its slope the difference of the mixture's rank and the class's; bracket
    the top, then meet in the middle of the tangents. Stops early once the bound passes ``enough``.
    """

    def at(charge: float) -> tuple[PricedChain, Dual, float]:
        priced = PricedChain(chain, (charge * rank_of).astype(np.float64))
        dual = solve_dual(priced, limit)
        mixed = _mixed_rank(dual, rank_of, chain.n, limit)
        rounding = _ROUNDING * abs(charge) * max(mixed, rank)  # tolls can grow beyond all costs
        return priced, replace(dual, bound=dual.bound - charge * rank - rounding), mixed - rank

    step = enough / max(chain.n, 1)
    sides: dict[bool, tuple[float, float, float]] = {}
    best: tuple[PricedChain, Dual, float] | None = None
    for _ in range(40):
        priced, dual, slope = at(toll)
        if best is None or dual.bound > best[1].bound:
            best = (priced, dual, toll)
        if dual.bound >= enough or abs(slope) < 1e-9:
            break
        sides[slope > 0] = (toll, dual.bound, slope)
        if len(sides) < 2:
            toll += step if slope > 0 else -step
            step *= 4
            continue
        (x0, y0, s0), (x1, y1, s1) = sides[True], sides[False]
        meet = (y1 - s1 * x1 - y0 + s0 * x0) / (s0 - s1)
        top = y0 + s0 * (meet - x0)
        if top - best[1].bound <= 1e-10 * enough or not min(x0, x1) < meet < max(x0, x1):
            break
        toll = meet
    assert best is not None
    return best
