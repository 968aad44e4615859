"""Guests: second machines on the hardware of survivors, for slots that no machine of its own fills. Pure.

A guest joins, is watched, and is lost as any machine is. So a lost slot that lives on a survivor is rebuilt
in the ways that there are, and moves to a machine that comes in the way in which any machine is drained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from swift_ft.recovery.job_state import Phase, State

__all__ = ["guests_of", "guests_wanted", "possible_hosts"]


def guests_of(state: State, machine: str) -> list[str]:
    """The guests on a machine that take part, as members or as spares."""
    membership = state.membership
    return sorted(
        guest
        for guest, host in membership.hosts.items()
        if host == machine and (guest in membership.slots or guest in membership.spares)
    )


def possible_hosts(state: State) -> list[str]:
    """Machines of their own that take part: by slot or, before the job has begun, by arrival."""
    membership = state.membership
    machines = [machine for _, machine in sorted(membership.members.items())]
    if state.generation == 0:
        machines += membership.waiting()
    return [machine for machine in machines if machine not in membership.hosts]


def guests_wanted(state: State) -> Mapping[str, tuple[int, ...]]:
    """Which machine takes a guest for which empty slots, if no machine of its own comes.

    The slots are dealt to those with the fewest guests, the first of them first. All participants compute
    the same, so each empty slot gets one guest.
    """
    membership, shape = state.membership, state.shape
    if state.phase != Phase.FORMING or (state.generation == 0 and shape.min_machines is None):
        return {}
    hosts = possible_hosts(state)
    if len(hosts) < (shape.min_machines or 1):
        return {}
    guests = membership.hosts
    taken = {spare.preferred_slot for machine, spare in membership.spares.items() if machine in guests}
    empty = [slot for slot in range(shape.machines) if slot not in membership.members and slot not in taken]
    own = sum(machine not in guests for machine in membership.spares)
    load = Counter({host: len(guests_of(state, host)) for host in hosts if host not in membership.declined})
    wanted: dict[str, tuple[int, ...]] = {}
    for slot in empty[own:]:
        host = min(load, key=lambda machine: (load[machine], hosts.index(machine)), default=None)
        if host is not None:
            load[host] += 1
            wanted[host] = (*wanted.get(host, ()), slot)
    return wanted
