"""Dependencies between workers (paper sections 4 and 5.3). The cost of a plan is linear in their number."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.plan import Plan, RecoveryMode, make_plan
from swift_ft.recovery.topology import Topology, checkpoint_owner, replica_sets


def worker(rank: int, *stages: int, holds: str = "", **fields: Any) -> StatusReported:
    parts = (holds,) if holds else ()
    return StatusReported(
        rank=rank, generation=1, iteration=47, live=True, stages=stages, holds=parts, **fields
    )


def job(*workers: StatusReported) -> dict[int, StatusReported]:
    return {status.rank: status for status in workers}


def test_replicas_hold_the_same() -> None:
    statuses = job(*(worker(rank, holds=f"stage {rank % 2}") for rank in (3, 1, 0, 2)))
    assert replica_sets(statuses) == [(0, 2), (1, 3)]
    topology = Topology.of(statuses, 1)
    assert topology.replica_sets == ((0, 2), (1, 3))
    assert topology.replicas_of == {0: (0, 2), 2: (0, 2), 1: (1, 3), 3: (1, 3)}


def test_a_worker_that_holds_nothing_is_alone() -> None:
    assert replica_sets(job(worker(0), worker(1))) == [(0,), (1,)]


def test_the_first_replica_owns_the_checkpoint() -> None:
    statuses = job(worker(3, holds="model"), worker(1, holds="model"), worker(0), worker(2))
    assert [checkpoint_owner(rank, statuses) for rank in range(5)] == [0, 1, 2, 1, 4]


@pytest.mark.parametrize(
    ("statuses", "pairs"),
    [
        (job(*(worker(rank, rank) for rank in range(4))), [(0, 1), (1, 2), (2, 3)]),
        (job(worker(0, 0, 2), worker(1, 1, 3)), [(0, 1)]),
        (job(worker(0, 0, 3), worker(1, 1, 2)), [(0, 1)]),
        (job(worker(0, 0), worker(1, 2)), []),
        (job(worker(0, 0), worker(1, 1, pipeline=1)), []),
        (job(worker(0, 0, linked=(2,)), worker(1, 1), worker(2, 2)), [(0, 1), (0, 2), (1, 2)]),
        (job(worker(0), worker(1)), []),
    ],
)
def test_neighbours_exchange_messages(
    statuses: dict[int, StatusReported], pairs: list[tuple[int, int]]
) -> None:
    neighbours = Topology.of(statuses, 1).neighbours
    assert sorted((a, b) for a in neighbours for b in neighbours[a] if a < b) == pairs
    assert all(a in neighbours[b] for a in neighbours for b in neighbours[a])


def test_a_machine_is_a_group_unless_its_workers_name_one() -> None:
    statuses = job(*(worker(rank, rank) for rank in range(4)))
    assert Topology.of(statuses, 2).group_of == {0: 0, 1: 0, 2: 1, 3: 1}
    named = {rank: replace(status, group=7) for rank, status in statuses.items()}
    assert Topology.of(named, 2).group_of == dict.fromkeys(range(4), 7)


def test_members_of_a_group_without_a_replica() -> None:
    statuses = job(worker(0, 0), worker(1, 1, holds="a"), worker(2, 2, holds="a"), worker(3, 3))
    assert Topology.of(statuses, 2).unreplicated_in == {0: [0], 1: [3]}


# ---------------------------------------------------------------------------------- the cost of a plan

STAGES = 8


def pipelines(workers: int) -> dict[int, StatusReported]:
    """Replicated pipelines of :data:`STAGES` stages."""
    return job(
        *(
            worker(
                rank,
                rank % STAGES,
                holds=f"stage {rank % STAGES}",
                pipeline=rank // STAGES,
                max_replay_shards=4,
            )
            for rank in range(workers)
        )
    )


def one_pipeline(workers: int) -> dict[int, StatusReported]:
    return job(*(worker(rank, rank, max_replay_shards=4) for rank in range(workers)))


def data_parallel(workers: int) -> dict[int, StatusReported]:
    return job(*(worker(rank, holds="model") for rank in range(workers)))


def one_group(workers: int) -> dict[int, StatusReported]:
    return {rank: replace(status, group=0) for rank, status in one_pipeline(workers).items()}


def without(statuses: Mapping[int, StatusReported], *lost: int) -> dict[int, StatusReported]:
    new = {rank: replace(statuses[rank], iteration=None, live=False) for rank in lost}
    return {**statuses, **new}


def every(step: int, of: int) -> range:
    return range(step // 2, of, step)


SITUATIONS: dict[str, tuple[RecoveryMode, Callable[[int], dict[int, StatusReported]]]] = {
    "first start": (RecoveryMode.START, lambda n: without(pipelines(n), *range(n))),
    "no loss": (RecoveryMode.CONTINUE, pipelines),
    "one replica": (RecoveryMode.REPLICA, lambda n: without(pipelines(n), 1, 2)),
    "one data-parallel replica": (RecoveryMode.REPLICA, lambda n: without(data_parallel(n), 1)),
    "half of all replicas": (RecoveryMode.REPLICA, lambda n: without(data_parallel(n), *every(2, n))),
    "one stage": (RecoveryMode.REPLAY, lambda n: without(one_pipeline(n), n // 2)),
    "every fourth stage": (RecoveryMode.REPLAY, lambda n: without(one_pipeline(n), *every(4, n))),
    "half of a pipeline": (RecoveryMode.REPLAY, lambda n: without(one_pipeline(n), *range(n // 2))),
    "all replicas of a stage": (RecoveryMode.REPLAY, lambda n: without(pipelines(n), *every(STAGES, n))),
    "a group of all": (RecoveryMode.FALLBACK, lambda n: without(one_group(n), 1)),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_plan_costs_in_proportion_to_the_workers(situation: str) -> None:
    mode, statuses_of = SITUATIONS[situation]
    plan, lines = plan_and_lines(statuses_of(128))
    larger_plan, larger_lines = plan_and_lines(statuses_of(512))
    assert plan.mode == larger_plan.mode == mode
    assert larger_lines < 4.5 * lines, f"{lines} lines for 128 workers, {larger_lines} for 512"


def plan_and_lines(statuses: Mapping[int, StatusReported]) -> tuple[Plan, int]:
    """A plan, and how many lines were executed for it: a cost that does not depend on the machine."""
    count, before = 0, sys.gettrace()

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        plan = make_plan(statuses, workers_per_machine=1, committed=20)
    finally:
        sys.settrace(before)
    return plan, count
