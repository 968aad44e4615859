"""Guests that come, go, or cannot come (`recovery/guests.py` says who takes one)."""

from __future__ import annotations

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.requests import slots_without_machine
from swift_ft.recovery.values import replace


def guest_declined(state: State, event: ev.GuestDeclined) -> State:
    """Note that a machine takes no guest, until all are live and another one is lost."""
    if event.machine not in state.membership.slots:
        return state
    declined = state.membership.declined.set(event.machine, event.reason)
    return replace(state, membership=replace(state.membership, declined=declined))


def machines_requested(state: State, event: ev.MachinesRequested) -> State:
    """Note which machine asks the scheduler for machines of these slots. Each is asked for once at a time."""
    membership = state.membership
    if event.machine not in membership.slots:
        return state
    missing = slots_without_machine(state)
    asked = {slot: event.machine for slot in event.slots if slot in missing}
    requested = membership.requested.update({s: m for s, m in asked.items() if s not in membership.requested})
    return replace(state, membership=replace(membership, requested=requested))


def relieve_guests(state: State) -> State:
    """Ask as many guests to leave as there are spares that could take their slots, the first slots first."""
    membership, committed = state.membership, state.checkpoints.committed
    if state.phase in (Phase.FORMING, Phase.ENDED) or not membership.hosts:
        return state
    guests = [machine for machine in membership.by_slot if machine in membership.hosts]
    staying = [guest for guest in guests if guest not in membership.draining]
    spares = sum(m not in membership.hosts and m not in membership.draining for m in membership.spares)
    # Guests that leave already take a spare each.
    leaving = staying[: max(0, spares - (len(guests) - len(staying)))]
    since = -1 if committed is None else committed
    draining = membership.draining.update(dict.fromkeys(leaving, since))
    return replace(state, membership=replace(membership, draining=draining)) if leaving else state
