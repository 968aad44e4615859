"""Machines that are lost while all report: they cost their own workers' reports, and no one else's."""

from __future__ import annotations

import random
from functools import reduce

import pytest

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import WorkerOrder, worker_order
from swift_ft.recovery.plan import Plan
from swift_ft.recovery.protocol import step

COMMITTED, REACHED = 20, 47
Worker = tuple[str, int, int]  # its machine, its rank, and the generation in which it was started


def joined(number: int) -> ev.MachineJoined:
    return ev.MachineJoined(machine=f"m{number}.0", address=f"m{number}:1")


def lost(machine: str) -> ev.MachineLost:
    return ev.MachineLost(machine=machine, reason="was killed")


def report(state: State, rank: int) -> ev.StatusReported:
    """What a worker reports that has its state if it has trained."""
    survivor = state.membership.started_in[state.slot_of_rank(rank)] == 1
    return ev.StatusReported(
        rank=rank,
        generation=state.generation,
        iteration=REACHED + rank % 2 if survivor else None,
        live=survivor,
        stages=(rank,),
        pipeline_known=True,
    )


def trained(machines: int, workers: int) -> State:
    """A job that trains, with spares enough for two losses of each slot."""
    opened = ev.JobOpened(machines=machines, workers_per_machine=workers, checkpoint=COMMITTED)
    events: list[ev.Event] = [opened, *map(joined, range(3 * machines))]
    state = reduce(step, events, State())
    reports = (ev.StatusReported(rank=rank, generation=1, iteration=None) for rank in range(state.world_size))
    state = reduce(step, reports, state)
    return reduce(step, [ev.WorkerReady(rank=rank, generation=1) for rank in range(state.world_size)], state)


def workers_of(state: State) -> list[Worker]:
    membership = state.membership
    return [
        (machine, rank, membership.started_in[slot])
        for slot, machine in sorted(membership.members.items())
        for rank in state.ranks_of(slot)
    ]


def order(state: State, worker: Worker) -> WorkerOrder:
    machine, rank, started_in = worker
    return worker_order(state, machine=machine, rank=rank, started_in=started_in)


def disturbed(state: State, rng: random.Random, slots: list[int]) -> tuple[Plan, list[Worker]]:
    """Lose the machines of these slots, at any time between the reports of all. Returns who has reported.

    A report may arrive late, when its worker's machine has been lost as well.
    """
    sent: list[Worker] = []
    on_its_way: dict[Worker, ev.StatusReported] = {}
    left = slots[1:]
    state = step(state, lost(state.membership.members[slots[0]]))
    while state.phase == Phase.AGREEING:
        free = (worker for worker in workers_of(state) if worker not in on_its_way)
        asked = [worker for worker in free if order(state, worker) == WorkerOrder.REPORT]
        choices = [*(["lose"] * bool(left)), *(["send"] * bool(asked)), *(["arrive"] * bool(on_its_way))]
        match rng.choice(choices):
            case "lose":
                state = step(state, lost(state.membership.members[left.pop(0)]))
            case "send":
                worker = rng.choice(asked)
                on_its_way[worker] = report(state, worker[1])
                sent.append(worker)
            case "arrive":
                worker = rng.choice(sorted(on_its_way))
                last = len(state.round.statuses) == state.world_size - 1
                if not (left and last):  # then the plan is made, and these losses are others
                    state = step(state, on_its_way.pop(worker))
    assert state.plan is not None
    return state.plan, sent


def undisturbed(state: State, slots: list[int]) -> Plan:
    """Lose the machines of these slots before anyone has reported."""
    for slot in slots:
        state = step(state, lost(state.membership.members[slot]))
    state = reduce(step, [report(state, rank) for rank in range(state.world_size)], state)
    assert state.plan is not None
    return state.plan


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("machines", [3, 5, 8])
def test_losses_in_any_order_cost_one_report_of_each_worker(machines: int, workers: int) -> None:
    state = trained(machines, workers)
    assert state.phase == Phase.LIVE
    further = 0
    for seed in range(150):
        rng = random.Random(seed)
        first = rng.sample(range(machines), rng.randint(1, machines - 1))
        slots = [*first, *rng.sample(first, rng.randint(0, 1))]  # the last one is lost a second time
        plan, sent = disturbed(state, rng, slots)
        assert len(sent) == len(set(sent))
        survivors = {worker for worker in workers_of(state) if state.slot_of_rank(worker[1]) not in first}
        assert survivors <= set(sent)
        assert plan == undisturbed(state, slots)
        further += len(slots) > 1
    assert further > 100


def test_a_loss_after_the_plan_asks_all_again() -> None:
    state = trained(4, 1)
    state = step(state, lost("m1.0"))
    state = reduce(step, [report(state, rank) for rank in range(4)], state)
    assert state.phase == Phase.RECOVERING
    state = step(state, lost("m2.0"))
    assert state.round.asked_in == state.generation == 3
    assert [order(state, worker) for worker in workers_of(state)] == [WorkerOrder.REPORT] * 4
