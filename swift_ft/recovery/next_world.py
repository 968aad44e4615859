"""The machines of the next world, for each change that an operator asks for. Pure.

A guest is never one of them: it has no hardware of its own. So a world with guests can go on with fewer
machines, and nothing else before machines have come for them.
"""

from __future__ import annotations

from swift_ft.errors import UsageError
from swift_ft.recovery.job_state import Phase, State
from swift_ft.units import counted, named


def check_changeable(state: State) -> None:
    """Refuse a job that cannot change to another world now.

    Raises:
        UsageError: with the reason.
    """
    worlds = state.worlds
    if state.phase == Phase.ENDED:
        raise UsageError("the run has ended")
    if state.generation and not state.has_sessions:
        raise UsageError("the run's script has no session: its workers cannot hand their state over")
    if worlds.change is not None:
        number = worlds.change.world.number
        raise UsageError(f"a change to world {number} is under way: ask again once it is over")
    if state.phase != Phase.LIVE:
        raise UsageError(f"the run does not train now ({state.phase}): ask again once all workers are live")
    if state.layouts.pending is not None:
        raise UsageError("the layout is about to change: ask again after that")
    if state.round.finished or state.membership.ended:
        raise UsageError("the training is complete: no other world follows")


def same_machines(state: State) -> tuple[str, ...]:
    """The machines that train now, by slot.

    Raises:
        UsageError: if one of them is a guest, or was asked to leave.
    """
    present = state.membership.by_slot
    guests = [slot for slot, machine in enumerate(present) if machine in state.membership.hosts]
    if guests:
        own = len(present) - len(guests)
        is_are = "is" if len(guests) == 1 else "are"
        raise UsageError(
            f"{named('slot', guests)} {is_are} run by other machines, too: start {len(guests)} more with "
            f"swift-recover join, or go on with {counted(own, 'machine')}: swift-recover scale {own}"
        )
    return _staying(state, present)


def moved(state: State, machine: str, to: str | None = None) -> tuple[str, ...]:
    """The machines once a spare has taken the slot of one of them.

    Args:
        machine: fills a slot.
        to: the spare; None for the one that has waited longest.

    Raises:
        UsageError: if there is no such spare, or the machine has no slot.
    """
    if state.slot_of(machine) is None:
        raise UsageError(f"{machine} has no slot to move: it waits as a spare")
    spares = state.membership.own_spares()
    if to is not None and to not in spares:
        waits = f"the spares are {', '.join(spares)}" if spares else "there is no spare"
        raise UsageError(f"{to} is no spare that could take a slot: {waits}")
    if not spares:
        raise UsageError("no spare waits to take its place: start a machine with swift-recover join")
    # Who is asked to leave may be moved: that is a way to let it go.
    present = state.membership.by_slot
    if any(member in state.membership.hosts for member in present):
        return same_machines(state)  # which says why not
    return _staying(state, tuple((to or spares[0]) if member == machine else member for member in present))


def moved_somewhere(state: State, slot: int) -> tuple[str, ...]:
    """The machines once a spare has taken a slot, or else the machine exchanges it with the next.

    Raises:
        UsageError: if there is neither a spare nor another machine, or a machine cannot take part.
    """
    machines = same_machines(state)
    if slot >= len(machines):
        raise UsageError(f"there is no slot {slot}: the job has {counted(len(machines), 'machine')}")
    if state.membership.own_spares():
        return moved(state, machines[slot])
    if len(machines) == 1:
        raise UsageError("no spare waits, and there is no other machine")
    other = (slot + 1) % len(machines)
    exchanged = {slot: machines[other], other: machines[slot]}
    return tuple(exchanged.get(place, machine) for place, machine in enumerate(machines))


def resized(state: State, count: int) -> tuple[str, ...]:
    """The machines of a world of so many: those that train now, by slot, and then those that wait.

    Those of the last slots leave first. Who was asked to leave is none of them.

    Raises:
        UsageError: if there are not so many, or the job needs more.
    """
    least = state.shape.min_machines or 1
    if count < least:
        raise UsageError(f"the job needs at least {least} machines, not {count}: see swift-run --nnodes")
    membership = state.membership
    own = [m for m in membership.by_slot if m not in membership.hosts and m not in membership.draining]
    there = [*own, *membership.own_spares()]
    if count > len(there):
        raise UsageError(
            f"the job has {counted(len(there), 'machine')}, {len(there) - len(own)} of them as spares: start "
            f"{count - len(there)} more with swift-recover join, on a host each"
        )
    return tuple(there[:count])


def _staying(state: State, machines: tuple[str, ...]) -> tuple[str, ...]:
    leaving = [machine for machine in machines if machine in state.membership.draining]
    if leaving:
        raise UsageError(f"{leaving[0]} was asked to leave: ask again once it has left")
    return machines
