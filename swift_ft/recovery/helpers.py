"""Parallel recovery: survivors compute microbatches of a replay (paper §5.2). Pure."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swift_ft.recovery.events import StatusReported


@dataclass(frozen=True, slots=True)
class ReductionHop:
    """One stop of a sum of gradients that travels from member to member.

    Attributes:
        rank: the member.
        microbatches: microbatches whose gradients the member adds, in this order.
    """

    rank: int
    microbatches: list[int]


@dataclass(frozen=True, slots=True)
class ParallelReplay:
    """A replay whose microbatches are divided among several workers.

    Attributes:
        owners: the rebuilt workers, whose stages are replayed. They take their steps in the user's loop.
        helpers: survivors that compute microbatches for the owners.
        begin: iterations ``begin .. until - 1`` are replayed.
        until: the consensus iteration.
    """

    owners: tuple[int, ...]
    helpers: tuple[int, ...]
    begin: int
    until: int

    @property
    def members(self) -> tuple[int, ...]:
        """All workers that take part, in the order of their shares.

        Helpers come first. If the shares differ by one, the owners, which also update, have the smaller ones,
        and a sum that travels from share to share ends at an owner.
        """
        return self.helpers + self.owners

    def microbatches_of(self, rank: int, microbatches: int) -> range:
        """The consecutive microbatches that a member computes, through all stages of all owners."""
        share, larger = divmod(microbatches, len(self.members))
        number = self.members.index(rank)
        begin = number * share + min(number, larger)
        return range(begin, begin + share + (number < larger))

    def hops(self, order: Sequence[int], owner: int, *, begun: bool) -> list[ReductionHop]:
        """The route of a sum that adds all microbatches in one order and ends at the owner.

        Args:
            order: all microbatches, in the order of the additions.
            owner: the worker that holds the stage.
            begun: the sum begins with what the owner already has.
        """
        shares = {rank: self.microbatches_of(rank, len(order)) for rank in self.members}
        member = {microbatch: rank for rank, share in shares.items() for microbatch in share}
        route = [ReductionHop(owner, [])] if begun else []
        for microbatch in order:
            if not route or route[-1].rank != member[microbatch]:
                route.append(ReductionHop(member[microbatch], []))
            route[-1].microbatches.append(microbatch)
        return route if route[-1].rank == owner else [*route, ReductionHop(owner, [])]


def assign_helpers(
    replays: Mapping[tuple[int, ...], tuple[int, int]],
    statuses: Mapping[int, StatusReported],
    free: Sequence[int],
) -> tuple[ParallelReplay, ...]:
    """Distribute free survivors evenly among the replays of their pipeline.

    A replay has no more members, its owners among them, than it has shards
    (:attr:`StatusReported.max_replay_shards`): each of them computes at least one microbatch.

    Args:
        replays: by the owners of each replay, its iterations ``(begin, until)``.
        statuses: one report per rank.
        free: survivors without a task, in the order in which they are assigned.

    Returns:
        The replays that have at least one helper, ordered by their owners.
    """
    helpers: dict[tuple[int, ...], list[int]] = {}
    shards: dict[tuple[int, ...], int] = {}
    shortest: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # by pipeline, a heap of (helpers, owners)
    for owners in sorted(replays):
        shards[owners] = min(statuses[owner].max_replay_shards for owner in owners)
        if len(owners) < shards[owners]:
            helpers[owners] = []
            shortest.setdefault(statuses[owners[0]].pipeline, []).append((0, owners))
    for rank in free:
        status = statuses[rank]
        queue = shortest.get(status.pipeline)
        if not queue or status.max_replay_shards <= 1:
            continue
        _, owners = heapq.heappop(queue)
        helpers[owners].append(rank)
        if len(owners) + len(helpers[owners]) < shards[owners]:
            heapq.heappush(queue, (len(helpers[owners]), owners))
    return tuple(
        ParallelReplay(owners, tuple(ranks), *replays[owners]) for owners, ranks in helpers.items() if ranks
    )
