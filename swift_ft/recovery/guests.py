"""Guests: second machines on the hardware of survivors, for slots that no machine of its own fills. Pure.

A guest joins, is watched, and is lost as any machine is. So a lost slot that lives on a survivor is rebuilt
in the ways that there are, and moves to a machine that comes in the way in which any machine is drained.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.survivors import comes_from_survivors


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
    machines = [*membership.by_slot]
    if state.generation == 0:
        machines += membership.waiting()
    return [machine for machine in machines if machine not in membership.hosts]


def leaving(state: State) -> list[int]:
    """Slots of machines of their own that were asked to leave."""
    membership = state.membership
    asked = (machine for machine in membership.draining if machine not in membership.hosts)
    return sorted(membership.slots[machine] for machine in asked if machine in membership.slots)


def guests_wanted(state: State) -> Mapping[str, tuple[int, ...]]:
    """The machine that takes a guest, for each slot for which no machine of its own comes.

    These are the empty slots, or those of machines that were asked to leave. They are dealt to the machines
    with the fewest guests, the first of them first. Where pipelines are replicas, a machine of another one
    counts as if it had one more: with it, two copies of a layer could be lost at once. All participants
    compute the same, so each slot gets one guest.
    """
    membership, shape, guests = state.membership, state.shape, state.membership.hosts
    if state.phase == Phase.ENDED or (state.generation == 0 and shape.min_machines is None):
        return {}
    going = leaving(state)
    if len(membership.members) == shape.machines and not going:
        return {}
    if comes_from_survivors(state):
        return {}
    empty = [slot for slot in range(shape.machines) if slot not in membership.members]
    hosts = [machine for machine in possible_hosts(state) if machine not in membership.draining]
    if len(hosts) < (shape.min_machines or 1):
        return {}
    taken = {spare.preferred_slot for machine, spare in membership.spares.items() if machine in guests}
    slots = [slot for slot in empty or going if slot not in taken]
    own = sum(m not in guests and m not in membership.draining for m in membership.spares)
    of_rank = {rank: number for number, ranks in enumerate(state.layouts.pipelines) for rank in ranks}
    queues = _queues(state, [host for host in hosts if host not in membership.declined], of_rank)
    wanted: dict[str, tuple[int, ...]] = {}
    for slot in slots[own:] if queues else ():
        near = _pipelines_of(state, slot, of_rank)
        pipelines = min(queues, key=lambda of: _rank_of(queues[of][0], far=_is_far(of, near)))
        load, order, host = queues[pipelines][0]
        heapq.heapreplace(queues[pipelines], (load + 1, order, host))
        wanted[host] = (*wanted.get(host, ()), slot)
    return wanted


_Pipelines = frozenset[int] | None
_Waiting = tuple[int, int, str]


def _queues(
    state: State, hosts: Sequence[str], of_rank: Mapping[int, int]
) -> dict[_Pipelines, list[_Waiting]]:
    """Machines that can take guests, as heaps of how many they have and of their order, by pipelines.

    A machine that is in no slot is in the pipelines of whatever slot its guest fills: None.
    """
    membership = state.membership
    load = Counter(
        host
        for guest, host in membership.hosts.items()
        if guest in membership.slots or guest in membership.spares
    )
    queues: dict[_Pipelines, list[_Waiting]] = {}
    for order, host in enumerate(hosts):
        slot = membership.slots.get(host)
        pipelines = None if slot is None else _pipelines_of(state, slot, of_rank)
        queues.setdefault(pipelines, []).append((load[host], order, host))
    for queue in queues.values():
        heapq.heapify(queue)
    return queues


def _rank_of(waiting: _Waiting, *, far: bool) -> tuple[int, bool, int]:
    load, order, _ = waiting
    return load + far, far, order


def _is_far(pipelines: _Pipelines, near: frozenset[int]) -> bool:
    """Whether the workers of a machine are in none of the pipelines of a slot."""
    return pipelines is not None and pipelines.isdisjoint(near)


def _pipelines_of(state: State, slot: int, of_rank: Mapping[int, int]) -> frozenset[int]:
    """The pipelines of a LayerStack in which a slot's workers are; one pipeline if there is no more."""
    return frozenset(of_rank.get(rank, 0) for rank in state.ranks_of(slot))
