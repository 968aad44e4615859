"""Changes to another world: planned, prepared, switched, or given up (`recovery/worlds.py`)."""

from __future__ import annotations

from immutables import Map

from swift_ft.recovery import events as ev
from swift_ft.recovery.handlers.layouts import too_late
from swift_ft.recovery.job_state import JobShape, Layouts, PendingLayout, Phase, RecoveryRound, State
from swift_ft.recovery.layout.change import Change as Forecast
from swift_ft.recovery.membership import Membership, Spare
from swift_ft.recovery.regrowth import full_size_after
from swift_ft.recovery.requests import requested_in
from swift_ft.recovery.survivors import answer_of, held_of, sources_of
from swift_ft.recovery.values import replace
from swift_ft.recovery.worlds import Change, OfferedState, World, Worlds, without_change


def change_planned(state: State, event: ev.ChangePlanned) -> State:
    """Begin to prepare another world, if its machines are there and nothing else is about to change."""
    worlds, membership = state.worlds, state.membership
    if worlds.change is not None or event.world != worlds.planned + 1:
        return state
    after_loss = state.phase == Phase.FORMING
    if after_loss and not answer_of(state).is_asked_for(state, event.machines, event.plan):
        return state
    if state.layouts.pending is not None and not after_loss:
        return state
    here = (machine in membership.slots or machine in membership.spares for machine in event.machines)
    if not event.machines or len({*event.machines}) < len(event.machines) or not all(here):
        return state
    if state.round.finished or membership.ended or any(m in membership.fenced for m in event.machines):
        return state
    present = worlds.present
    world = World(
        event.world,
        event.machines,
        event.command or present.command,
        event.proof if event.command else present.proof,
        event.world if event.reload else present.sources,
        # A plan is one for a number of machines.
        event.plan or (present.plan if len(event.machines) == state.shape.machines else ""),
        forecast=Forecast(event.before_ns, event.after_ns, event.cost_ns) if event.before_ns else None,
    )
    full = full_size_after(state, event.machines, event.plan)
    change = Change(world, started_in=state.generation + 1, full=full)
    if after_loss:
        state, change = _asking_survivors(state), replace(change, held=held_of(state))
    return replace(state, worlds=Worlds(present, change, planned=event.world, full=worlds.full))


def _asking_survivors(state: State) -> State:
    """Have all survivors report. Their reports count on, if guests come before a state was offered."""
    agreed = RecoveryRound(asked_in=state.generation, after_silence=state.round.after_silence)
    return replace(state, round=agreed, layouts=replace(state.layouts, pending=None))


def survivor_reported(state: State) -> State:
    """Once all survivors of a loss have reported, states of one iteration are offered, or copies of them."""
    change, statuses = state.worlds.change, state.round.statuses
    if change is None or not change.held:
        return state
    survivors = (rank for slot in state.membership.members for rank in state.ranks_of(slot))
    if any(rank not in statuses for rank in survivors):
        return state
    sources = sources_of(statuses, change.held, state.checkpoints.committed)
    if sources.reason:
        return give_up_change(state, sources.reason)
    pending = PendingLayout(sources.iteration, world=change.world.number)
    # What they do with their states is to be asked anew, if guests come after all.
    agreed = replace(state.round, decided=True)
    state = replace(state, round=agreed, layouts=replace(state.layouts, pending=pending))
    return _with_change(state, replace(change, sources=sources.ranks, copies=sources.copies))


def next_prepared(state: State, event: ev.NextPrepared) -> State:
    """Note that a worker of the next world waits for its state."""
    change = state.worlds.change
    if change is None or change.world.number != event.world:
        return state
    return _with_change(state, replace(change, prepared=change.prepared.set(event.rank, None)))


def switch_requested(state: State, event: ev.SwitchRequested) -> State:
    """Have all workers stop at an iteration, once the next world is prepared."""
    change = state.worlds.change
    if change is None or change.world.number != event.world or not all_prepared(state, change):
        return state
    if state.layouts.pending is not None or too_late(state, event):
        return state
    pending = PendingLayout(event.iteration, world=event.world)
    return replace(state, layouts=replace(state.layouts, pending=pending))


def state_offered(state: State, event: ev.StateOffered) -> State:
    """Note that a worker has stopped, and where a state is."""
    change, pending = state.worlds.change, state.layouts.pending
    if change is None or pending is None:
        return state
    if (pending.world, pending.iteration) != (change.world.number, event.iteration):
        return state
    holder = event.rank if event.holder is None else event.holder
    if change.held and event.rank not in change.owed_by(holder):
        return state
    machine = state.membership.members[state.slot_of_rank(holder)]
    offer = OfferedState(event.rank, event.address, machine, event.digest)
    return _with_change(state, replace(change, offered=change.offered.set(event.rank, offer)))


def state_taken(state: State, event: ev.StateTaken) -> State:
    """Note that a worker of the next world has its state. With the last one that world takes over."""
    change = state.worlds.change
    if change is None or change.world.number != event.world or not all_offered(state, change):
        return state
    change = replace(change, taken=change.taken.set(event.rank, None))
    state = _with_change(state, change)
    return state if len(change.taken) < world_size_of(state, change) else _switch(state, change)


def change_given_up(state: State, event: ev.ChangeGivenUp) -> State:
    """Train on in the present world. Workers that have stopped for the next one go on as they are."""
    change = state.worlds.change
    if change is None or change.world.number != event.world:
        return state
    return give_up_change(state, event.reason)


def give_up_change(state: State, reason: str) -> State:
    """The state without a change that was under way, if one was."""
    if state.worlds.change is None:
        return state
    pending = state.layouts.pending
    layouts = state.layouts if pending is None or not pending.world else replace(state.layouts, pending=None)
    return replace(state, worlds=without_change(state.worlds, reason), layouts=layouts)


def world_size_of(state: State, change: Change) -> int:
    """Number of workers of the next world."""
    return len(change.world.machines) * state.shape.workers_per_machine


def all_prepared(state: State, change: Change) -> bool:
    """Whether all workers of the next world wait for their state."""
    return len(change.prepared) == world_size_of(state, change)


def all_offered(state: State, change: Change) -> bool:
    """Whether all who are to offer their state do: all workers of the present world, or its survivors."""
    if change.held:
        return bool(change.sources) and all(rank in change.offered for rank in change.sources)
    return len(change.offered) == state.world_size


def _with_change(state: State, change: Change) -> State:
    return replace(state, worlds=replace(state.worlds, change=change))


def _switch(state: State, change: Change) -> State:
    """The next world takes over, in a generation of its own. All its workers are about to report.

    Parts of checkpoints and logs of the world before are of another layout. The last committed checkpoint
    stays: it can be loaded into any.
    """
    assert state.layouts.pending is not None
    since, generation = state.layouts.pending.iteration, change.started_in
    world = replace(change.world, since=since, spent_ns=_spent_ns(state, change.world, since))
    # Where it begins with a committed checkpoint, no replay needs a log from before it.
    saved = since <= (state.checkpoints.committed or 0)
    ranks = () if saved else range(world_size_of(state, change))
    checkpoints = replace(
        state.checkpoints,
        requested=None,
        epoch=state.checkpoints.epoch + 1,
        parts=Map(),
        revoked=Map(),
        log_gap_before=Map(dict.fromkeys(ranks, since)),
        log_since=generation,
    )
    membership = _in_slots(state.membership, world.machines, generation)
    return replace(
        state,
        phase=Phase.AGREEING,
        generation=generation,
        shape=_shape_of(state.shape, len(world.machines)),
        membership=replace(membership, requested=requested_in(state, change), asked_again=0),
        round=RecoveryRound(asked_in=generation),
        checkpoints=checkpoints,
        # Scripts begin with their own layout. What copies of memory there are, are of another one.
        layouts=Layouts(since=since, changes=state.layouts.changes + 1),
        worlds=Worlds(world, planned=state.worlds.planned, full=change.full),
    )


def _spent_ns(state: State, following: World, since: int) -> int:
    """The time of all machines in the iterations before another world; 0 if nobody knows."""
    if following.forecast is None:
        return 0
    machines = sum(machine not in state.membership.hosts for machine in state.membership.slots)
    return state.worlds.present.spent_until(since, machines * following.forecast.before_ns)


def _shape_of(shape: JobShape, machines: int) -> JobShape:
    """The job's shape with another number of machines: as many can always run all its slots."""
    least = shape.min_machines
    return replace(shape, machines=machines, min_machines=None if least is None else min(least, machines))


def _in_slots(membership: Membership, machines: tuple[str, ...], generation: int) -> Membership:
    """The membership with these machines in the slots. Members that have none any more wait as spares."""
    members = Map(dict(enumerate(machines)))
    left = sorted(machine for machine in membership.slots if machine not in machines)
    spares = membership.spares
    for number, machine in enumerate(left):
        domain = membership.domains.get(membership.slots[machine], "")
        spares = spares.set(machine, Spare(membership.arrivals + number, None, domain))
    domains = {slot: _domain_of(membership, machine) for slot, machine in enumerate(machines)}
    for machine in machines:
        if machine in spares:
            spares = spares.delete(machine)
    return replace(
        membership,
        members=members,
        slots=Map({machine: slot for slot, machine in enumerate(machines)}),
        started_in=Map(dict.fromkeys(range(len(machines)), generation)),
        domains=Map(domains),
        spares=spares,
        arrivals=membership.arrivals + len(left),
        # Who is slow is judged by the work of the present world.
        pace=Map(),
    )


def _domain_of(membership: Membership, machine: str) -> str:
    if machine in membership.spares:
        return membership.spares[machine].domain
    return membership.domains.get(membership.slots[machine], "")
