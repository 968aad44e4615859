"""Which machines are replayed together, and what their workers are told."""

from __future__ import annotations

import pytest

from swift_ft.errors import UsageError
from swift_ft.offline.replay_plan import (
    GENERATION,
    ReplayPlan,
    machine_name,
    machines_to_replay,
    synthetic_journal,
    workers_to_replay,
)
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import WorkerOrder, worker_order
from swift_ft.recovery.protocol import step
from tests.support.stored_run import pipeline_record


def test_a_machine_by_itself() -> None:
    records = {rank: pipeline_record(rank) for rank in range(4)}
    assert machines_to_replay(records, 2, 1) == (2,)


def test_the_machines_of_a_group() -> None:
    records = {rank: pipeline_record(rank, group=group) for rank, group in enumerate((0, 1, 1, 2))}
    assert machines_to_replay(records, 1, 1) == (1, 2)
    assert machines_to_replay(records, 3, 1) == (3,)


def test_replicas_and_those_of_their_machines() -> None:
    """Two pipelines of two stages on two machines each; machine 0 holds all of the first one."""
    records = {rank: pipeline_record(rank % 4, pipeline=rank // 4 * 4, group=rank // 2) for rank in range(8)}
    assert machines_to_replay(records, 0, 2) == (0, 2)
    assert machines_to_replay(records, 3, 2) == (1, 3)


def test_all_machines_are_too_many() -> None:
    records = {rank: pipeline_record(rank, group=0) for rank in range(3)}
    with pytest.raises(UsageError, match="machines 0, 1 and 2 recover together"):
        machines_to_replay(records, 1, 1)


def test_the_workers_that_are_rebuilt_with_one() -> None:
    """Those of its group and those that its script binds it to, in its own pipeline."""
    records = {rank: pipeline_record(rank % 4, pipeline=rank // 4) for rank in range(8)}
    assert workers_to_replay(records, 5) == {5}
    records |= {rank: pipeline_record(rank % 4, pipeline=rank // 4, group=9) for rank in (1, 2, 5, 6)}
    assert workers_to_replay(records, 5) == {5, 6}
    assert workers_to_replay(records, 2) == {1, 2}
    records[0] = pipeline_record(0, together=(0, 3))
    records[3] = pipeline_record(3, together=(0, 3))
    assert workers_to_replay(records, 3) == {0, 3}


@pytest.mark.parametrize(("begin", "until"), [(3, 7), (3, 3)])
def test_the_journal_orders_a_replay(begin: int, until: int) -> None:
    """As in a live recovery: machine 2 was replaced, and its worker loads the checkpoint and replays."""
    records = {rank: pipeline_record(rank) for rank in range(4)}
    plan = ReplayPlan(4, 1, records, (2,), begin, until)
    state = State()
    for event in synthetic_journal(plan):
        state = step(state, event)
    assert (state.phase, state.generation) == (Phase.AGREEING, GENERATION)
    report = ev.StatusReported(rank=2, generation=GENERATION, iteration=None, stages=(2,), holds=("stage 2",))
    state = step(state, report)
    assert state.plan is not None
    task = state.plan.tasks[2]
    assert (task.load, task.begin, task.replay_until) == (begin, begin, until)
    assert all(other.idle for rank, other in state.plan.tasks.items() if rank != 2)
    name = machine_name(2, replaced=True)
    assert worker_order(state, machine=name, rank=2, started_in=GENERATION) == WorkerOrder.EXECUTE
    state = step(state, ev.WorkerReady(rank=2, generation=GENERATION))
    assert worker_order(state, machine=name, rank=2, started_in=GENERATION) == WorkerOrder.RUN
