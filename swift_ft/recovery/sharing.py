"""Who helps whom in a replay: survivors take over microbatches of what was lost (paper §5.2). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swift_ft.recovery.events import Reported

__all__ = ["Leg", "SharedReplay", "share_replays"]


@dataclass(frozen=True, slots=True)
class Leg:
    """A member adds what it has to a sum that comes by.

    Attributes:
        rank: the member.
        microbatches: what it adds, in this order.
    """

    rank: int
    microbatches: list[int]


@dataclass(frozen=True, slots=True)
class SharedReplay:
    """A replay whose microbatches are spread.

    Attributes:
        owners: the rebuilt workers, whose stages are replayed: they take their steps in the user's loop.
        helpers: survivors, which compute microbatches for them.
        begin: iterations ``begin .. until - 1`` are replayed.
        until: the consensus iteration.
    """

    owners: tuple[int, ...]
    helpers: tuple[int, ...]
    begin: int
    until: int

    @property
    def members(self) -> tuple[int, ...]:
        """All of them, in the order of their shares.

        Helpers come first: where the shares differ by one, owners, who also update, have the smaller ones;
        and a sum that is passed on from share to share ends where it belongs.
        """
        return self.helpers + self.owners

    def microbatches_of(self, rank: int, microbatches: int) -> range:
        """Those that a member computes, through all stages of all owners: consecutive ones."""
        share, over = divmod(microbatches, len(self.members))
        number = self.members.index(rank)
        begin = number * share + min(number, over)
        return range(begin, begin + share + (number < over))

    def legs(self, order: Sequence[int], owner: int, *, begun: bool) -> list[Leg]:
        """The way of a sum from member to member, so that it is added up in one order, and ends at the owner.

        Args:
            order: of all microbatches.
            owner: whose stage it is.
            begun: whether the sum begins with what the owner already has.
        """
        shares = {rank: self.microbatches_of(rank, len(order)) for rank in self.members}
        member = {microbatch: rank for rank, share in shares.items() for microbatch in share}
        way = [Leg(owner, [])] if begun else []
        for microbatch in order:
            if not way or way[-1].rank != member[microbatch]:
                way.append(Leg(member[microbatch], []))
            way[-1].microbatches.append(microbatch)
        return way if way[-1].rank == owner else [*way, Leg(owner, [])]


def share_replays(
    replays: Mapping[tuple[int, ...], tuple[int, int]], standings: Mapping[int, Reported], free: Sequence[int]
) -> tuple[SharedReplay, ...]:
    """Deal those who would only wait out among the replays.

    Args:
        replays: for the workers of each replay, the iterations ``(begin, until)``.
        standings: one report per rank; :attr:`Reported.parts` says in how many parts a replay can be split.
        free: survivors without a task, by rank.

    Returns:
        The replays that are shared by at least one helper.
    """
    helping = {rank: standings[rank].pipeline for rank in free if standings[rank].parts > 1}
    room = {
        owners: min(standings[rank].parts for rank in owners) - 1
        for owners in sorted(replays)
        if all(standings[rank].parts > 1 for rank in owners)
    }
    dealt: dict[tuple[int, ...], list[int]] = {owners: [] for owners in room}
    for rank, pipeline in helping.items():
        short = [
            owners
            for owners in room
            if len(dealt[owners]) < room[owners] and standings[owners[0]].pipeline == pipeline
        ]
        if short:
            dealt[min(short, key=lambda owners: len(dealt[owners]))].append(rank)
    return tuple(
        SharedReplay(owners, tuple(helpers), *replays[owners]) for owners, helpers in dealt.items() if helpers
    )
