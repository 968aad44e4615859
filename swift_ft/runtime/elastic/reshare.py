"""Redistribution of global batches: worker 0 asks for it once a replica is slower than its peers.

A slow replica gets fewer samples, in proportion to how long it was found to take for its own work. So does
one whose device runs the workers of a lost machine, too. Once all are as they were, so are their shares.
Pipelines that are replicas share microbatches, by how long each takes for them: as soon as a machine is lost,
and before any layer has moved.
"""

from __future__ import annotations

from collections.abc import Sequence

from swift_ft.costs.shared_machines import loads_of_pipelines, worth_sharing
from swift_ft.errors import UsageError
from swift_ft.recovery.devices import device_of, devices_of_stages, pace_of
from swift_ft.recovery.job_state import State
from swift_ft.recovery.layout.stage_layers import cuts_of, stages_in
from swift_ft.runtime.data.dealing import DealtBatches
from swift_ft.runtime.elastic.layer_profiler import LayerCosts
from swift_ft.runtime.elastic.rebalance import may_change
from swift_ft.runtime.pipeline.shared_layers import SharedLayers

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
        # All workers stop for a change (decision 23), so it has to pay.
        return best if _took(present, speeds) >= _GAIN * _took(best, speeds) else None


def _speeds(state: State, shares: Sequence[int]) -> list[float]:
    """Samples of each replica in equal times, if its first share was right as long as it was not slow."""
    devices = [device_of(state, rank) for rank in range(state.world_size)]
    return [
        # Workers on one device take turns.
        share * 1000 / pace_of(state, rank) / devices.count(devices[rank])
        for rank, share in enumerate(shares)
    ]


def _took(shares: Sequence[int], speeds: Sequence[float]) -> float:
    """The relative time of an iteration, which is that of its slowest replica."""
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


class ShareMicrobatches:
    """The same for the pipelines of a LayerStack.

    Args:
        dealt: the batches that pipelines share.
        shared: what the pipelines share.
        by_pace: whether slower machines get fewer microbatches, and not only those that run two workers.
    """

    def __init__(
        self, dealt: DealtBatches, costs: LayerCosts, shared: SharedLayers, *, by_pace: bool
    ) -> None:
        self._dealt = dealt
        self._costs = costs
        self._begun = shared.counts
        self._fewest = shared.fewest_microbatches
        self._by_pace = by_pace

    def wanted(self, state: State, iteration: int) -> tuple[int, ...] | None:
        """The shares to ask for after an iteration, in samples; None if the present ones stay.

        Args:
            iteration: completed iterations.
        """
        changes, batches, one = state.layouts.shares, self._dealt.only, self._dealt.microbatch
        since = changes[-1].since if changes else 0
        if batches is None or not one or not may_change(state, iteration, since, len(changes)):
            return None
        present = [share // one for share in batches.shares_at(iteration)]
        if (loads := self._loads(state)) is None or len(loads) != len(present):
            return None
        best = worth_sharing(loads, present, self._fewest)
        # Unlike pipelines may be unlike in their devices, too: a plan knows more of these than was measured.
        alike = len({*self._begun}) == 1 and all(own == loads[0] for own in loads)
        if alike or self._is_as_begun(state):
            best = [*self._begun]
        return None if best == present else tuple(count * one for count in best)

    def _is_as_begun(self, state: State) -> bool:
        """Whether each machine runs its own worker alone, and as fast as others."""
        membership = state.membership
        guests = any(machine in membership.hosts for machine in membership.members.values())
        return not guests and not (self._by_pace and membership.pace)

    def _loads(self, state: State) -> list[list[int]] | None:
        """By pipeline, what each of its devices takes for a microbatch, in nanoseconds."""
        if (layers := self._costs.read(state)) is None:
            return None
        stages = stages_in(state.round.statuses)
        return loads_of_pipelines(
            layers,
            cuts_of(devices_of_stages(state), stages),
            cuts_of(state.layouts.present, stages),
            state.membership.pace if self._by_pace else {},
        )
