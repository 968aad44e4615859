"""Events that a phase still expects from some machines: those that every worker tells once. Pure.

A relay holds such events back until it has all of them, because the phase ends with the last one anyway.
So may joins be held while a job forms for the first time. All other events are urgent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State


class Told(NamedTuple):
    """A kind of event that each worker tells once, with the number that says which occasion it counts for.

    Attributes:
        number: the generation in which they count; the iteration of a checkpoint's parts; 0 otherwise.
    """

    kind: type[ev.Event]
    number: int


def told(event: ev.Event) -> tuple[Told, int] | None:
    """The occasion that an event belongs to, and the rank that tells it; None if the event is urgent."""
    match event:
        case ev.StatusReported():
            return Told(ev.StatusReported, 0), event.rank  # those of several generations may count together
        case ev.WorkerReady() | ev.WorkerFinished() | ev.LayoutBoundaryReached() | ev.GroupAwaited():
            return Told(type(event), event.generation), event.rank
        case ev.PartPersisted():
            return Told(ev.PartPersisted, event.iteration), event.rank
        case ev.ScriptExited(rank=int(rank)):
            return Told(ev.ScriptExited, 0), rank
    return None


def is_known(state: State, event: ev.Event) -> bool:
    """Whether an event that is urgent elsewhere says nothing new here: each machine has several watchers."""
    return isinstance(event, ev.MachineLost) and event.machine in state.membership.fenced


def joins_awaited(state: State) -> int:
    """The number of machines still to join a job that forms for the first time: no join before is urgent.

    0 at any other time: a machine that joins then may be the one that a recovery waits for.
    """
    if state.phase != Phase.FORMING or state.generation:
        return 0
    return max(0, state.shape.machines - len(state.membership.members) - len(state.membership.spares))


def awaited(state: State, what: Told, slots: range) -> set[int]:
    """Ranks in these slots whose event is still outstanding."""
    ranks = _ranks(state, slots)
    if what.kind in ev.OF_A_GENERATION and what.number > state.generation:
        return set(ranks)  # the worker has read a block that is still to come here
    current = what.number == state.generation
    if what.kind is ev.StatusReported:
        if state.phase != Phase.AGREEING:
            return set(ranks)  # as above, or a slot is empty, and no one waits for it
        statuses, sessionless = state.round.statuses, state.round.sessionless
        return {r for r in ranks if r not in statuses and state.slot_of_rank(r) not in sessionless}
    if what.kind is ev.WorkerReady and current and state.phase == Phase.RECOVERING:
        return state.not_ready(ranks)
    if what.kind is ev.WorkerFinished and current:
        return {rank for rank in ranks if rank not in state.round.finished}
    if what.kind is ev.LayoutBoundaryReached and current:
        return {rank for rank in ranks if rank not in state.round.stopped}
    if what.kind is ev.GroupAwaited and current and _awaits_all(state):
        return {rank for rank in ranks if rank not in state.round.awaiting}
    if what.kind is ev.ScriptExited:
        return {rank for rank in ranks if rank not in state.membership.ended}
    if what.kind is ev.PartPersisted:
        parts = state.checkpoints.parts.get(what.number)
        return {rank for rank in ranks if parts is None or rank not in parts}
    return set()


def _awaits_all(state: State) -> bool:
    """Whether the next group that is awaited is one of all workers, and not of some that replay together."""
    moves = state.plan is not None and state.plan.new_layout is not None
    return state.phase == Phase.RECOVERING and moves


def _ranks(state: State, slots: range) -> Iterator[int]:
    workers = state.shape.workers_per_machine
    members = state.membership.members
    return (rank for rank in range(slots.start * workers, slots.stop * workers) if rank // workers in members)
