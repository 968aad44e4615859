"""When global batches are dealt anew: worker 0 asks for it, once a replica is slower than its peers.

A slow replica gets fewer samples, in proportion to how long it was found to take for its own work. So does
one whose device runs the workers of a lost machine, too. Once all are as they were, so are their shares.
"""

from __future__ import annotations

from collections.abc import Sequence

from swift_ft.errors import UsageError
from swift_ft.recovery.devices import device_of, pace_of
from swift_ft.recovery.job_state import State
from swift_ft.runtime.data.dealing import DealtBatches
from swift_ft.runtime.rebalance import may_change

__all__ = ["Reshare"]

_GAIN = 1.05
"""By how much an iteration must become shorter."""


class Reshare:
    """Worker 0's look at the shares, after each iteration.

    Args:
        dealt: the batches that replicas share.
    """

    def __init__(self, dealt: DealtBatches) -> None:
        self._dealt = dealt

    def wanted(self, state: State, iteration: int) -> tuple[int, ...] | None:
        """The shares to ask for after an iteration; None if the present ones stay.

        Args:
            state: of the job.
            iteration: completed iterations.
        """
        changes, batches = state.layouts.shares, self._dealt.only
        since = changes[-1].since if changes else 0
        if batches is None or not may_change(state, iteration, since, len(changes)):
            return None
        if len(batches.shares) != state.world_size:
            return None
        present = batches.shares_at(iteration)
        speeds = _speeds(state, batches.shares)
        try:
            best = batches.shares_for(speeds)
        except UsageError:  # as it may be with weights, too: they can be too unequal for its units
            return None
        return best if _took(present, speeds) >= _GAIN * _took(best, speeds) else None


def _speeds(state: State, shares: Sequence[int]) -> list[float]:
    """Samples of each replica in equal times, if its first share was right as long as it was not slow."""
    devices = [device_of(state, rank) for rank in range(state.world_size)]
    return [
        share * 1000 / pace_of(state, rank) / devices.count(devices[rank])
        for rank, share in enumerate(shares)
    ]


def _took(shares: Sequence[int], speeds: Sequence[float]) -> float:
    """How long an iteration takes: as long as that of its slowest replica."""
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))
