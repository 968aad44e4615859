"""Partitions by class: prices per byte and per step of rank that bound one class from below.

Machines that compute alike make costs come in steps: a partition's cost is mostly a matter of its *rank*, the
sum over groups of a whole number that grows with the size of the group. Prices on bytes alone mix ranks and
leave a gap of about a step; with a second price, the *toll* per step of rank, each rank has its own bound.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from swift_ft.planning.grouping.chain import Chain, FloatArray, IntArray
from swift_ft.planning.grouping.lagrange import Partition, PricedChain

_ROUNDS = 60


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
        """Where the lowest cut is highest: price and toll there, and whether that is a wall of the box."""
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
