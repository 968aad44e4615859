"""Reconciling the replicas of one part of the model after a failure (paper §2.3, §4). Pure.

A failure can leave replicas at different iterations or halfway through an update. The first of these ways
that is possible makes them equal again:

    nothing    all replicas have completed the same iteration
    forward    a replica that completed the interrupted iteration sends its state to the others
    copy       no replica completed it: a parameter comes from a replica that has not updated it yet
    undo       every replica has updated the parameter: each undoes its own update
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swift_ft.recovery.events import StatusReported


@dataclass(frozen=True, slots=True)
class Transfer:
    """State that one replica broadcasts to others.

    Attributes:
        source: the rank that sends.
        targets: the ranks that receive.
        parameters: indices of the parameters, sent with their optimizer state; None for the whole state.
        layers: numbers of the layers, sent with all state that goes with them and what belongs to no layer;
            empty where it is not a LayerStack of several pipelines.
    """

    source: int
    targets: tuple[int, ...]
    parameters: tuple[int, ...] | None = None
    layers: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, in ascending order."""
        return tuple(sorted({self.source, *self.targets}))


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The undos and transfers that make the replicas of one part equal again.

    Attributes:
        iteration: iterations that they have completed afterwards.
        undo: by rank, parameters whose update is undone, before any transfer: none where a worker goes back
            from an iteration that has updated nothing.
        transfers: in the order in which they are done.
    """

    iteration: int
    undo: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    transfers: tuple[Transfer, ...] = ()


def reconcile_replicas(replicas: Mapping[int, StatusReported]) -> Reconciliation | None:
    """Bring the replicas of one part to the latest state that one of them has whole.

    Args:
        replicas: the report of each replica, by rank.

    Returns:
        The result of the first way that is possible, or None if no replica has a usable state.
    """
    if len(replicas) == 1:  # most parts of a long pipeline: nothing is to be compared
        ((rank, only),) = replicas.items()
        if not _is_usable(only):
            return None
        return Reconciliation(only.iteration or 0, {rank: only.updated} if only.updated else {})
    live = {rank: s for rank, s in replicas.items() if _is_usable(s)}
    if not live:
        return None
    # The latest whole state wins. Without one, the latest state that is halfway through an update.
    whole = {rank: s for rank, s in live.items() if not s.updated}
    iteration = max(s.iteration or 0 for s in (whole or live).values())
    latest = {rank: s for rank, s in live.items() if s.iteration == iteration}
    undo = {rank: s.updated for rank, s in latest.items() if s.updated}
    transfers = _copies(latest)
    if rest := tuple(sorted(replicas.keys() - latest.keys())):
        # Without a whole state, the source becomes whole by the undos and copies that come before this.
        source = min(whole.keys() & latest.keys(), default=min(latest))
        transfers = (*transfers, Transfer(source, rest))
    return Reconciliation(iteration, undo, transfers)


def _is_usable(status: StatusReported) -> bool:
    return status.live and status.iteration is not None and not status.dirty


def roll_back_to(replicas: Mapping[int, StatusReported], iteration: int) -> Reconciliation | None:
    """Roll back a part that is one iteration ahead of the others, and of which some replicas were copied.

    A copied replica has no log of the iteration, so it cannot resend its messages. The state before the
    iteration comes from replicas that were interrupted in it; if there are none, from those that can undo it,
    or have updated nothing in it.

    Args:
        replicas: the report of each replica, by rank.
        iteration: iterations that the other parts have completed.

    Returns:
        None if no replica can get back to that state.
    """
    undo: dict[int, tuple[int, ...]] = {}
    # A copy comes first: it has no rounding, as an undo may have.
    before = [
        rank
        for rank, s in replicas.items()
        if s.live and s.iteration == iteration and not (s.dirty or s.updated)
    ]
    if not before:
        undo = {
            rank: s.undoable
            for rank, s in replicas.items()
            if s.live and s.iteration == iteration + 1 and s.goes_back
        }
        before = list(undo)
    if not before:
        return None
    rest = tuple(sorted(replicas.keys() - before))
    return Reconciliation(iteration, undo, (Transfer(min(before), rest),) if rest else ())


def _copies(replicas: Mapping[int, StatusReported]) -> tuple[Transfer, ...]:
    """Transfers of each parameter that only some replicas have updated, from the first that has not."""
    updated_by: dict[int, list[int]] = {}
    for rank in sorted(replicas):
        for parameter in set(replicas[rank].updated):
            updated_by.setdefault(parameter, []).append(rank)
    parameters_of: dict[tuple[int, ...], list[int]] = {}
    # Each transfer needs a group of its own, so parameters with the same receivers travel together.
    for parameter, ranks in sorted(updated_by.items()):
        parameters_of.setdefault(tuple(ranks), []).append(parameter)
    transfers = [
        Transfer(min(untouched), targets, tuple(parameters))
        for targets, parameters in parameters_of.items()
        if (untouched := replicas.keys() - targets)
    ]
    # All workers do them in this order. Otherwise two would wait for each other.
    return tuple(sorted(transfers, key=lambda transfer: (transfer.source, transfer.targets)))
