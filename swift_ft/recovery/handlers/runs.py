"""Runs of events that all workers tell once, and of joins, noted together.

In a large job a block of the journal holds hundreds of reports. Each of them alone would make its own state,
of all fields, and none but the last matters. What is noted here is what the handlers of single events make of
the same events, one after the other. An event that may complete its phase is left to its own handler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from immutables import Map, MapMutation

from swift_ft.recovery import events as ev
from swift_ft.recovery.exclusion import machines_left_out
from swift_ft.recovery.handlers.checkpoints import part_that_counts
from swift_ft.recovery.handlers.recovery import report_counts, status_that_counts
from swift_ft.recovery.job_state import Phase, SavedPart, State
from swift_ft.recovery.membership import Spare, base_of
from swift_ft.recovery.values import replace


def _statuses(state: State, run: Sequence[ev.StatusReported]) -> tuple[State, int]:
    if state.membership.ended:  # each report may end the job
        return state, 0
    # The last survivor's report says who offers a state.
    if state.phase == Phase.FORMING and state.worlds.change is not None:
        return state, 0
    statuses, count = _noted(
        state,
        state.round.statuses,
        run,
        counts=lambda event: report_counts(state, event),
        what=lambda event: status_that_counts(state, event),
    )
    if statuses is None:
        return state, count
    return replace(state, has_sessions=True, round=replace(state.round, statuses=statuses)), count


def _ready(state: State, run: Sequence[ev.WorkerReady]) -> tuple[State, int]:
    ready, count = _noted(
        state,
        state.round.ready,
        run,
        counts=lambda event: event.generation == state.generation,
        what=lambda event: None,
    )
    if ready is None:
        return state, count
    return replace(state, round=replace(state.round, ready=ready)), count


def _noted(
    state: State,
    told: Map[int, Any],
    run: Sequence[Any],
    *,
    counts: Callable[[Any], bool],
    what: Callable[[Any], Any],
) -> tuple[Map[int, Any] | None, int]:
    """The map ``told`` with the first events of a run entered, and the number of these events.

    None of them completes the phase. If none of them counts, it is None.
    """
    most = state.world_size - 1
    now, count, changed = told.mutate(), 0, False
    for event in run:
        if counts(event):
            if len(now) >= most:
                break
            now[event.rank] = what(event)
            changed = True
        count += 1
    return (now.finish() if changed else None), count


def _parts(state: State, run: Sequence[ev.PartPersisted]) -> tuple[State, int]:
    parts = state.checkpoints.parts
    changed: dict[int, MapMutation[int, SavedPart]] = {}
    for event in run:
        if (part := part_that_counts(state, event)) is not None:
            if event.iteration not in changed:
                changed[event.iteration] = parts.get(event.iteration, Map[int, SavedPart]()).mutate()
            changed[event.iteration][event.rank] = part
    if not changed:
        return state, len(run)
    parts = parts.update({iteration: of_it.finish() for iteration, of_it in changed.items()})
    return replace(state, checkpoints=replace(state.checkpoints, parts=parts)), len(run)


def _joins(state: State, run: Sequence[ev.MachineJoined]) -> tuple[State, int]:
    """Machines like all others that join a job which forms, and do not fill it."""
    if state.phase != Phase.FORMING or machines_left_out(state):  # one of them may be refused
        return state, 0
    membership = state.membership
    least = state.shape.machines - len(membership.members)  # spares that fill all slots
    spares, addresses = membership.spares.mutate(), membership.addresses.mutate()
    identities, bearers = membership.identities.mutate(), membership.bearers.mutate()
    arrivals, count = membership.arrivals, 0
    for event in run:
        # These change more than the spares, or are refused: their own handler decides.
        base, identity = base_of(event.machine), event.identity
        if event.host or event.setup != state.shape.setup or base in membership.silent:
            break
        if not (membership.knows(event.machine) or event.machine in spares):
            if len(spares) + 1 >= least or (identity and (base in identities or identity in bearers)):
                break
            if identity:
                identities[base], bearers[identity] = identity, event.machine
            spares[event.machine] = Spare(arrivals, event.preferred_slot, event.domain)
            addresses[event.machine] = event.address
            arrivals += 1
        count += 1
    if arrivals == membership.arrivals:
        return state, count
    membership = replace(
        membership,
        spares=spares.finish(),
        addresses=addresses.finish(),
        identities=identities.finish(),
        bearers=bearers.finish(),
        arrivals=arrivals,
    )
    return replace(state, membership=membership), count


NOTED_TOGETHER: Mapping[type[ev.Event], Callable[[State, Any], tuple[State, int]]] = {
    ev.MachineJoined: _joins,
    ev.StatusReported: _statuses,
    ev.WorkerReady: _ready,
    ev.PartPersisted: _parts,
}
"""By kind of event: notes the first events of a run in a phase that takes them. It returns the state, and how
many events that were."""
