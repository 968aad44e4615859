"""Holders: the machines that keep copies of what others have set in the rendezvous store. Pure.

The store may be lost together with a machine. What the machine had set is then with its holder: the next
machine in the order of the slots, on another host. So nothing is lost unless three fail at once.
"""

from __future__ import annotations

import itertools

from swift_ft.recovery.job_state import State


def holder_of(state: State, machine: str) -> str | None:
    """The holder of a member's keys, or a spare's; None if there is no other machine.

    A spare is one only where there is no other member.
    """
    membership = state.membership
    members, hosts = membership.members, membership.hosts
    own_host, own_slot = hosts.get(machine, machine), membership.slots.get(machine, -1)
    machines = state.shape.machines
    for slot in itertools.chain(range(own_slot + 1, machines), range(own_slot)):
        other = members.get(slot)
        if other is not None and hosts.get(other, other) != own_host:
            return other
    return next((spare for spare in membership.waiting() if hosts.get(spare, spare) != own_host), None)


def fenced_between(before: State, after: State) -> list[str]:
    """The machines that were lost between two states."""
    old, new = before.membership.fenced, after.membership.fenced
    return [] if new is old else [machine for machine in new if machine not in old]
