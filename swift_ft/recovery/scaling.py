"""The next machine to leave when an operator asks for a run with fewer machines. Pure."""

from __future__ import annotations

from swift_ft.recovery.guests import guests_of
from swift_ft.recovery.job_state import State


def machines_of(state: State) -> list[str]:
    """The machines of a run: those that fill a slot, in order of their slots, and then those that wait.

    Guests are not machines of their own.
    """
    membership = state.membership
    machines = (*membership.by_slot, *membership.waiting())
    return [machine for machine in machines if machine not in membership.hosts]


def leaves_next(state: State) -> str:
    """The machine that is missed least: one that waits, then one without guests, then the last slot's.

    Raises:
        ValueError: if the run has no machine.
    """
    membership = state.membership

    def missed(machine: str) -> tuple[bool, int, int]:
        slot = membership.slots.get(machine)
        return slot is not None, len(guests_of(state, machine)), 0 if slot is None else -slot

    return min(reversed(machines_of(state)), key=missed)
