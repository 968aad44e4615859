"""Heads: which machine passes on whose events and blocks, derived from the state. Pure.

Slots fall into groups of :data:`FANOUT`, groups into groups of groups, until one is left. The head of a
group, at each level, is its first machine that is not suspected. A machine that is no head goes to the head
of its group, a head to that of the next level, and the head of all goes to the store. A job of at most
FANOUT machines has no heads.

A first version let up to FANOUT heads go to the store. Each wrote a block in each phase, and read those of
all others: 32 heads cost 1,024 reads, so that operations for each machine grew with the job. A phase waits
for the last machine anyway, so several ways to the store are no safer than one that is replaced.

A machine's head always has a lower slot than the machine, whatever each of them suspects. So machines that
hold the same state never pass events on in a circle. No machine goes through one without a slot, once slots
are filled.

Until then there are no heads. The machines have tickets instead, and go through one with a lower ticket
(:func:`met_by`).
"""

from __future__ import annotations

from collections.abc import Collection

from swift_ft.recovery.job_state import State

FANOUT = 32
"""Machines in a group; as many go to the store themselves."""


def levels_of(machines: int, fanout: int = FANOUT) -> int:
    """The number of levels of heads between the machines of a job and the store."""
    if machines <= fanout:
        return 0
    levels = 0
    while machines > 1:
        machines = -(-machines // fanout)
        levels += 1
    return levels


def upstream_of(
    state: State, machine: str, suspected: Collection[str] = (), fanout: int = FANOUT
) -> str | None:
    """The machine through which another one reads and writes the journal; None for the store itself.

    Args:
        machine: any machine. A spare goes to the head of one group or another; one that has not joined, and
            one that was lost, to the store.
        suspected: machines that do not answer this one. They are passed over.
        fanout: see :data:`FANOUT`.
    """
    slot = state.slot_of(machine)
    if slot is None:
        return _upstream_of_spare(state, machine, suspected, fanout)
    width = 1
    for _ in range(levels_of(state.shape.machines, fanout)):
        width *= fanout
        if (head := _first(state, range(slot - slot % width, slot), suspected)) is not None:
            return head
    return None


def _upstream_of_spare(state: State, machine: str, suspected: Collection[str], fanout: int) -> str | None:
    machines, membership = state.shape.machines, state.membership
    spare = membership.spares.get(machine)
    if spare is None or not membership.members or not levels_of(machines, fanout):
        return None
    start = spare.arrival % -(-machines // fanout) * fanout
    return _first(state, range(start, start + fanout), suspected) or _first(state, range(machines), suspected)


def met_by(ticket: int, fanout: int = FANOUT) -> int | None:
    """The ticket of the machine through which one goes before slots are filled; None: the store itself."""
    return (ticket - 1) // fanout if ticket > 0 else None


def served_by(state: State, machine: str, suspected: Collection[str] = (), fanout: int = FANOUT) -> range:
    """The slots whose events a machine passes on: its own, and those of its groups if it is a head."""
    slot = state.slot_of(machine)
    if slot is None:
        return range(0)
    machines, width = state.shape.machines, 1
    for _ in range(levels_of(machines, fanout)):
        wider = width * fanout
        if _first(state, range(slot - slot % wider, slot), suspected) is not None:
            break
        width = wider
    return range(slot, min(slot - slot % width + width, machines))


def _first(state: State, slots: range, suspected: Collection[str]) -> str | None:
    members, addresses = state.membership.members, state.membership.addresses
    found = (members.get(slot, "") for slot in slots)  # one that has left in the end has no address
    return next((machine for machine in found if machine in addresses and machine not in suspected), None)
