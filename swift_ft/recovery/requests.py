"""Machines that the scheduler is to be asked for, and the one that asks. Pure.

A slot is asked for once: the journal says so before the scheduler is asked, so that a machine which takes
over from the one that asks, or starts again, does not ask a second time. A slot that was filled by a machine
of its own since then, and is empty again, is another loss. If a machine that comes is refused, one more is
asked for, a few times: later and later, as the scheduler may give the same machine again. Slots that losses
have taken from a job are asked for as well (`recovery/regrowth.py`): they are numbered behind those that it
has.
"""

from __future__ import annotations

from immutables import Map

from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.membership import base_of
from swift_ft.recovery.regrowth import missing_of
from swift_ft.recovery.values import replace
from swift_ft.recovery.worlds import Change

MOST_ASKED_AGAIN = 6
"""Requests in a row that may be repeated, as the machine that came was refused."""


def slots_without_machine(state: State) -> tuple[int, ...]:
    """Slots of a job that has begun which no machine of their own fills, and no spare is there to fill."""
    membership = state.membership
    if not state.generation or state.phase == Phase.ENDED or membership.ended:
        return ()
    missing = missing_of(state)
    if len(membership.members) == state.shape.machines and not membership.hosts and not missing:
        return ()
    members, hosts = membership.members, membership.hosts
    slots = [s for s in range(state.shape.machines) if s not in members or members[s] in hosts]
    slots += missing
    spares = sum(m not in hosts and m not in membership.draining for m in membership.spares)
    return tuple(slots[spares:])


def to_request(state: State, machine: str) -> tuple[int, ...]:
    """The slots for which this machine has to ask the scheduler: those that nobody has asked for."""
    slots = slots_to_ask(state)
    return slots if slots and _asks(state) == machine else ()


def slots_to_ask(state: State) -> tuple[int, ...]:
    """The slots without a machine that nobody has asked for."""
    return tuple(slot for slot in slots_without_machine(state) if slot not in state.membership.requested)


def asked_again(state: State, machine: str) -> State:
    """One open request has come to nothing if a machine is refused as it joins: it is made once more.

    Not if it has been here before under another name: nobody has asked for that one.
    """
    membership = state.membership
    came_for = [slot for slot in slots_without_machine(state) if slot in membership.requested]
    was_here = any(base_of(lost) == base_of(machine) for lost in membership.fenced)
    if not came_for or was_here or membership.asked_again >= MOST_ASKED_AGAIN:
        return state
    requested, times = membership.requested.delete(came_for[-1]), membership.asked_again + 1
    return replace(state, membership=replace(membership, requested=requested, asked_again=times))


def requested_in(state: State, change: Change) -> Map[int, str]:
    """The requests that are still open when another world takes over, by the slots that it is short of.

    Args:
        state: before it does.
    """
    if change.full is None:
        return Map()
    hosts, requested = state.membership.hosts, state.membership.requested
    before = sum(machine not in hosts for machine in state.membership.slots)
    came = max(0, len(change.world.machines) - before)
    missing = range(len(change.world.machines), len(change.full.machines))
    open_requests = [machine for _, machine in sorted(requested.items())][came:]
    # What waits as a spare counts for the first ones (`slots_without_machine`).
    slots = missing[max(0, len(missing) - len(open_requests)) :]
    return Map(zip(slots, open_requests, strict=False))


def _asks(state: State) -> str | None:
    """The machine of its own in the lowest slot."""
    membership = state.membership
    return next((machine for machine in membership.by_slot if machine not in membership.hosts), None)
