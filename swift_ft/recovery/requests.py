"""Machines that the scheduler is to be asked for, and the one that asks. Pure.

A slot is asked for once: the journal says so before the scheduler is asked, so that a machine which takes
over from the one that asks, or starts again, does not ask a second time. A slot that was filled by a machine
of its own since then, and is empty again, is another loss.
"""

from __future__ import annotations

from swift_ft.recovery.job_state import Phase, State


def slots_without_machine(state: State) -> tuple[int, ...]:
    """Slots of a job that has begun which no machine of their own fills, and no spare is there to fill."""
    membership = state.membership
    if not state.generation or state.phase == Phase.ENDED or membership.ended:
        return ()
    if len(membership.members) == state.shape.machines and not membership.hosts:
        return ()
    members, hosts = membership.members, membership.hosts
    slots = [s for s in range(state.shape.machines) if s not in members or members[s] in hosts]
    spares = sum(m not in hosts and m not in membership.draining for m in membership.spares)
    return tuple(slots[spares:])


def to_request(state: State, machine: str) -> tuple[int, ...]:
    """The slots for which this machine has to ask the scheduler: those that nobody has asked for."""
    slots = slots_without_machine(state)
    if not slots or _asks(state) != machine:
        return ()
    return tuple(slot for slot in slots if slot not in state.membership.requested)


def _asks(state: State) -> str | None:
    """The machine of its own in the lowest slot."""
    membership = state.membership
    members = (membership.members[slot] for slot in sorted(membership.members))
    return next((machine for machine in members if machine not in membership.hosts), None)
