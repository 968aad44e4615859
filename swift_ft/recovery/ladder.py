"""The exactness ladder: which state the replicas of one part go on from (paper §2.3, §4). Pure.

    nothing    all replicas stand at the same iteration
    forward    a replica that completed the interrupted iteration gives it to the others: nothing is lost
    copy       nobody completed it: a parameter that some replica has not updated yet is copied from there
    undo       every replica has updated the parameter: each takes its own update back

A replica is defined by what it holds, not by how its gradients are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swift_ft.recovery.events import Reported

__all__ = ["Agreement", "Transfer", "agree", "groups_by_part", "keeper_of", "retreat"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """State that goes from one replica to others, by broadcast.

    Attributes:
        source: the rank that has it.
        targets: the ranks that get it.
        parameters: indices of the parameters (with their optimizer state); None for the whole state.
    """

    source: int
    targets: tuple[int, ...]
    parameters: tuple[int, ...] | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Everybody who takes part."""
        return tuple(sorted({self.source, *self.targets}))


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the replicas of one part do to be equal again.

    Attributes:
        iteration: where they stand afterwards.
        undo: parameters whose update is taken back first, by rank.
        transfers: then, in this order.
    """

    iteration: int
    undo: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    transfers: tuple[Transfer, ...] = ()


def groups_by_part(standings: Mapping[int, Reported]) -> list[dict[int, Reported]]:
    """Workers that hold the same part, by rank. One alone is a group too: it may have to undo."""
    groups: dict[tuple[str, ...], dict[int, Reported]] = {}
    for rank, standing in sorted(standings.items()):
        groups.setdefault(standing.holds or (f"worker {rank}",), {})[rank] = standing
    return list(groups.values())


def keeper_of(rank: int, standings: Mapping[int, Reported]) -> int:
    """The replica that saves the checkpoint for all that hold the same: the first one."""
    return next((min(group) for group in groups_by_part(standings) if rank in group), rank)


def agree(group: Mapping[int, Reported]) -> Agreement | None:
    """Climb the ladder: the first rung that is there.

    Args:
        group: what each replica of one part reported, by rank.

    Returns:
        None if no replica is left from which the state could be had.
    """
    live = {rank: s for rank, s in group.items() if s.live and s.iteration is not None and not s.dirty}
    if not live:
        return None
    # A whole state of the latest iteration wins; without one, the latest that stands in its update.
    whole = {rank: s for rank, s in live.items() if not s.updated}
    iteration = max(s.iteration or 0 for s in (whole or live).values())
    standing = {rank: s for rank, s in live.items() if s.iteration == iteration}
    undo = {rank: s.updated for rank, s in standing.items() if s.updated}
    source = min(set(whole) & set(standing), default=min(standing))
    rest = tuple(sorted(set(group) - set(standing)))
    transfers = _copies(standing)
    if rest:
        transfers = (*transfers, Transfer(source, rest))
    return Agreement(iteration, undo, transfers)


def retreat(group: Mapping[int, Reported], iteration: int) -> Agreement | None:
    """Back for a stage that is ahead of the others, where some replicas only got there by a copy.

    Those have no log of the iteration from which they could serve it. By copy, where a survivor was
    interrupted in it and has the state before it; else each survivor undoes the iteration.

    Args:
        group: what each replica of one part reported, by rank.
        iteration: where the other parts stand.

    Returns:
        None if there is no way back.
    """
    before = [
        r for r, s in group.items() if s.live and s.iteration == iteration and not (s.dirty or s.updated)
    ]
    undo = {}
    if not before:
        undo = {
            r: s.undoable for r, s in group.items() if s.live and s.iteration == iteration + 1 and s.undoable
        }
        before = list(undo)
    if not before:
        return None
    rest = tuple(sorted(group.keys() - before))
    return Agreement(iteration, undo, (Transfer(min(before), rest),) if rest else ())


def _copies(standing: Mapping[int, Reported]) -> tuple[Transfer, ...]:
    """Each parameter that some replicas have updated and others have not, from the first that has not."""
    updated = {rank: frozenset(s.updated) for rank, s in standing.items()}
    routes: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for parameter in sorted(frozenset().union(*updated.values())):
        targets = tuple(sorted(rank for rank, done in updated.items() if parameter in done))
        untouched = standing.keys() - set(targets)
        if untouched:
            routes.setdefault((min(untouched), targets), []).append(parameter)
    return tuple(Transfer(source, targets, tuple(ps)) for (source, targets), ps in sorted(routes.items()))
