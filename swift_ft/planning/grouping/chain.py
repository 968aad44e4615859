"""A chain of machines: compute time of each, and bytes over each boundary.

Group costs follow §5.3 of the paper. A group ``G`` of neighbouring machines needs, per replayed iteration,

    R(G) = sum of compute_s + (bytes over the boundaries inside G) / bandwidth        [seconds]

divided by ``floor(N / |G|)`` where parallel recovery (§5.2) spreads its microbatches over helpers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from swift_ft.costs.chain_profile import ChainProfile
from swift_ft.planning.checks import check_positive

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chain:
    """Costs of every group of consecutive machines, in constant time each.

    Attributes:
        profile: the measured pipeline.
        bandwidth: bytes per second between two machines.
        parallel: whether a group's recovery is spread over ``floor(N / |G|)`` replicas (§5.2, §5.3).
    """

    profile: ChainProfile
    bandwidth: float
    parallel: bool = False

    def __post_init__(self) -> None:
        check_positive({"the bandwidth": self.bandwidth}, "number of bytes per second")

    @property
    def n(self) -> int:
        """Number of machines."""
        return self.profile.n_machines

    @cached_property
    def boundary(self) -> IntArray:
        """Bytes per iteration over each boundary, shape (N - 1,)."""
        return np.array(self.profile.boundary_bytes, dtype=np.int64)

    @cached_property
    def probability(self) -> FloatArray:
        """The probability that a failure hits this machine, shape (N,); sums to one."""
        weights = np.array(self.profile.failure_weight or (1.0,) * self.n, dtype=np.float64)
        chances: FloatArray = weights / weights.sum()
        return chances

    @cached_property
    def cum_probability(self) -> FloatArray:
        """Prefix sums of :attr:`probability`, shape (N + 1,)."""
        return np.concatenate(([0.0], np.cumsum(self.probability)))

    @cached_property
    def end_time(self) -> FloatArray:
        """``R(i..j-1) = end_time[j] - start_time[i]``, undivided; shape (N + 1,), entry 0 unused."""
        inner = np.concatenate(([0.0, 0.0], np.cumsum(self.boundary / self.bandwidth)))
        return self._cum_compute + inner

    @cached_property
    def start_time(self) -> FloatArray:
        """See :attr:`end_time`; shape (N + 1,), entry N is unused."""
        inner = np.concatenate(([0.0], np.cumsum(self.boundary / self.bandwidth), [0.0]))
        return self._cum_compute + inner

    @cached_property
    def _cum_compute(self) -> FloatArray:
        return np.concatenate(([0.0], np.cumsum(np.array(self.profile.compute_s, dtype=np.float64))))

    @cached_property
    def share(self) -> FloatArray:
        """The factor on ``R(G)`` by group size: ``1 / floor(N / g)`` with parallel recovery, else 1."""
        sizes = np.arange(1, self.n + 1)
        spread = self.n // sizes if self.parallel else np.ones_like(sizes)
        return np.concatenate(([0.0], 1.0 / spread))

    def replay_s(self, start: int, stop: int) -> float:
        """Seconds to replay one iteration of the group of machines ``start .. stop - 1``: ``R(G)``."""
        whole = float(self.end_time[stop] - self.start_time[start])
        return whole * float(self.share[stop - start])

    def chance(self, start: int, stop: int) -> float:
        """The chance that a failure hits the group of machines ``start .. stop - 1``."""
        return float(self.cum_probability[stop] - self.cum_probability[start])

    def expected_replay_s(self, starts: Sequence[int]) -> float:
        """Expected seconds per replayed iteration, ``sum of P(G) R(G)``, by where groups begin."""
        stops = [*starts[1:], self.n]
        return math.fsum(self.chance(i, j) * self.replay_s(i, j) for i, j in zip(starts, stops, strict=True))

    def logged_bytes(self, starts: Sequence[int]) -> int:
        """Bytes per iteration that cross the boundaries between groups that begin at ``starts``."""
        return sum(self.profile.boundary_bytes[start - 1] for start in starts if start > 0)
