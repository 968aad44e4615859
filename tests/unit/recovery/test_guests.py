"""Which machine takes a guest: dealt quickly, and as if each slot were dealt by looking at all machines."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from immutables import Map

from swift_ft.recovery.guests import guests_of, guests_wanted, leaving, possible_hosts
from swift_ft.recovery.job_state import JobShape, Layouts, Phase, State
from swift_ft.recovery.membership import Membership, Spare


def by_looking_at_all(state: State) -> Mapping[str, tuple[int, ...]]:
    """What the docstring of :func:`guests_wanted` says, slot by slot."""
    membership = state.membership
    hosts = [machine for machine in possible_hosts(state) if machine not in membership.draining]
    going = leaving(state)
    empty = [slot for slot in range(state.shape.machines) if slot not in membership.members]
    taken = {s.preferred_slot for machine, s in membership.spares.items() if machine in membership.hosts}
    slots = [slot for slot in empty or going if slot not in taken]
    own = sum(m not in membership.hosts and m not in membership.draining for m in membership.spares)
    load = Counter({host: len(guests_of(state, host)) for host in hosts if host not in membership.declined})
    wanted: dict[str, tuple[int, ...]] = {}
    for slot in slots[own:]:

        def far(machine: str, slot: int = slot) -> bool:
            in_slot = membership.slots.get(machine)
            pipelines = state.layouts.pipelines
            of_rank = {rank: number for number, ranks in enumerate(pipelines) for rank in ranks}
            of = {of_rank[rank] for rank in state.ranks_of(slot)}
            own = {of_rank[rank] for rank in state.ranks_of(slot if in_slot is None else in_slot)}
            return of.isdisjoint(own)

        host = min(load, key=lambda m: (load[m] + far(m), far(m), hosts.index(m)), default=None)
        if host is not None:
            load[host] += 1
            wanted[host] = (*wanted.get(host, ()), slot)
    return wanted


def some_state(rng: random.Random) -> State:
    """A job with empty slots, guests, spares, machines that leave, and machines that decline."""
    machines = rng.choice((4, 6, 8, 12))
    pipelines = rng.choice((1, 2, 3, 4))
    filled = [slot for slot in range(machines) if rng.random() < 0.7]
    members = {slot: f"m-{slot}.0" for slot in filled}
    guests = {member: rng.choice([*members.values()]) for member in members.values() if rng.random() < 0.2}
    spares = {f"s-{i}.0": Spare(i, rng.choice((None, i)), "") for i in range(rng.randrange(3))}
    if members:
        spares |= {f"g-{i}.0": Spare(9 + i, i, "") for i in range(rng.randrange(2))}
        guests |= {spare: rng.choice([*members.values()]) for spare in spares if spare.startswith("g-")}
    names = [*members.values()]
    membership = Membership(
        members=Map(members),
        slots=Map({machine: slot for slot, machine in members.items()}),
        spares=Map(spares),
        hosts=Map(guests),
        draining=Map({name: 1 for name in names if rng.random() < 0.15}),
        declined=Map({name: "memory" for name in names if rng.random() < 0.15}),
    )
    shape = JobShape(machines, rng.choice((1, 2)), min_machines=rng.choice((None, 1, 3)))
    ends = sorted(rng.sample(range(1, machines * shape.workers_per_machine), pipelines - 1))
    borders = [*pairwise([0, *ends, machines * shape.workers_per_machine])]
    return State(
        phase=rng.choice((Phase.FORMING, Phase.LIVE)),
        generation=rng.randrange(3),
        shape=shape,
        membership=membership,
        layouts=Layouts(pipelines=tuple(tuple(range(*border)) for border in borders)),
    )


def test_guests_are_dealt_as_if_all_machines_were_looked_at_for_each() -> None:
    rng = random.Random(19)
    dealt = 0
    for _ in range(600):
        state = some_state(rng)
        wanted = guests_wanted(state)
        hosts = [h for h in possible_hosts(state) if h not in state.membership.draining]
        too_early = state.generation == 0 and state.shape.min_machines is None
        too_few = len(hosts) < (state.shape.min_machines or 1)
        assert wanted == ({} if too_early or too_few else by_looking_at_all(state))
        dealt += len(wanted)
    assert dealt > 100


def test_no_guest_is_wanted_after_the_end() -> None:
    state = some_state(random.Random(1))
    assert guests_wanted(replace(state, phase=Phase.ENDED)) == {}
