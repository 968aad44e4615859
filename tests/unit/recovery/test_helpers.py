"""Helpers in a replay (paper §5.2): cases, and properties of all assignments."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.recovery import events as ev
from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.helpers import ParallelReplay, assign_helpers
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import make_plan
from swift_ft.recovery.protocol import step


def job(ranks: int, lost: set[int], *, shards: int = 8, at: int = 25) -> dict[int, StatusReported]:
    """A pipeline with one stage a worker."""
    return {
        rank: StatusReported(
            rank=rank,
            generation=1,
            iteration=None if rank in lost else at,
            live=rank not in lost,
            stages=(rank,),
            pipeline_known=True,
            max_replay_shards=shards,
        )
        for rank in range(ranks)
    }


@pytest.mark.parametrize(
    ("lost", "shards", "expected"),
    [
        ({1}, 8, [ParallelReplay((1,), (0, 2, 3, 4), 20, 25)]),
        ({1}, 3, [ParallelReplay((1,), (0, 2), 20, 25)]),  # as many as there are microbatches
        ({1}, 1, []),
        ({1, 2}, 8, [ParallelReplay((1, 2), (0, 3, 4), 20, 25)]),  # neighbours replay jointly
        ({1, 2}, 3, [ParallelReplay((1, 2), (0,), 20, 25)]),  # each member has a microbatch
        ({1, 2}, 2, []),
        ({1, 3}, 8, [ParallelReplay((1,), (0, 4), 20, 25), ParallelReplay((3,), (2,), 20, 25)]),
    ],
)
def test_cases(lost: set[int], shards: int, expected: list[ParallelReplay]) -> None:
    plan = make_plan(job(5, lost, shards=shards), workers_per_machine=1, committed=20)
    assert list(plan.parallel_replays) == expected


def test_the_order_of_the_reports_does_not_matter() -> None:
    reports = dict(reversed(job(5, {1}, shards=3).items()))
    assert make_plan(reports, workers_per_machine=1, committed=20).parallel_replays == (
        ParallelReplay((1,), (0, 2), 20, 25),
    )


def test_no_helpers_without_a_replay() -> None:
    assert make_plan(job(5, {1}, at=20), workers_per_machine=1, committed=20).parallel_replays == ()
    assert make_plan(job(5, set()), workers_per_machine=1, committed=20).parallel_replays == ()


def test_no_helpers_for_an_owner_that_cannot_be_helped() -> None:
    reports = job(5, {1})
    reports[1] = replace(reports[1], max_replay_shards=1)
    assert make_plan(reports, workers_per_machine=1, committed=20).parallel_replays == ()


@given(
    st.sets(st.integers(0, 11), min_size=1, max_size=11),
    st.lists(st.integers(1, 6), min_size=12, max_size=12),
    st.lists(st.integers(0, 1), min_size=12, max_size=12),
)
def test_a_survivor_helps_once_and_a_replay_gets_no_more_than_it_can_use(
    lost: set[int], shards: list[int], pipelines: list[int]
) -> None:
    reports = {
        rank: replace(report, max_replay_shards=shards[rank], pipeline=pipelines[rank])
        for rank, report in job(12, lost).items()
    }
    replays: dict[tuple[int, ...], tuple[int, int]] = {(rank,): (20, 25) for rank in lost}
    free = [rank for rank in reports if rank not in lost]
    shared = assign_helpers(replays, reports, free)
    helpers = [rank for replay in shared for rank in replay.helpers]
    assert len(helpers) == len(set(helpers))
    assert set(helpers) <= set(free)
    for replay in shared:
        (owner,) = replay.owners
        assert 1 <= len(replay.helpers) < shards[owner]
        assert all(shards[rank] > 1 and pipelines[rank] == pipelines[owner] for rank in replay.helpers)
    for owner in (rank for (rank,) in replays if shards[rank] > 1):  # no survivor that could help is idle
        mine = next((replay.helpers for replay in shared if owner in replay.owners), ())
        if len(mine) < shards[owner] - 1:
            able = {r for r in free if shards[r] > 1 and pipelines[r] == pipelines[owner]}
            assert able <= set(helpers)


@given(st.integers(1, 9), st.integers(1, 20))
def test_microbatches_are_dealt_out_evenly(members: int, microbatches: int) -> None:
    replay = ParallelReplay((7,), tuple(range(10, 9 + members)), 0, 1)
    dealt = [list(replay.microbatches_of(rank, microbatches)) for rank in replay.members]
    assert sorted(index for share in dealt for index in share) == list(range(microbatches))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert len(replay.microbatches_of(7, microbatches)) == min(map(len, dealt))  # owners have more to do


@given(st.data(), st.integers(1, 9), st.integers(1, 20), st.integers(1, 3), st.booleans())
def test_a_sum_meets_all_microbatches_in_their_order(
    data: st.DataObject, helpers: int, microbatches: int, owners: int, begun: bool
) -> None:
    replay = ParallelReplay(tuple(range(owners)), tuple(range(10, 10 + helpers)), 0, 1)
    order = data.draw(st.permutations(range(microbatches)))
    owner = data.draw(st.sampled_from(replay.owners))
    route = replay.hops(order, owner, begun=begun)
    assert [microbatch for hop in route for microbatch in hop.microbatches] == [*order]
    for hop in route:
        assert set(hop.microbatches) <= set(replay.microbatches_of(hop.rank, microbatches))
    assert route[-1].rank == owner
    assert not begun or route[0].rank == owner
    assert all(one.rank != other.rank for one, other in itertools.pairwise(route))


def test_the_usual_order_takes_one_hop_for_each_member() -> None:
    replay = ParallelReplay((7,), (1, 2, 3), 0, 1)
    assert [hop.rank for hop in replay.hops(range(8), 7, begun=False)] == [1, 2, 3, 7]


def recovering() -> State:
    """Machine C has replaced B, which is to be replayed with the help of A."""
    state = State()
    events: list[ev.Event] = [
        ev.JobOpened(machines=2, checkpoint=20),
        *(ev.MachineJoined(machine=name) for name in "AB"),
    ]
    events += [
        StatusReported(
            rank=rank,
            generation=1,
            iteration=25,
            live=True,
            stages=(rank,),
            pipeline_known=True,
            max_replay_shards=8,
        )
        for rank in (0, 1)
    ]
    events += [ev.MachineLost(machine="B", reason="why"), ev.MachineJoined(machine="C")]
    for event in events:
        state = step(state, event)
    for report in job(2, {1}).values():
        state = step(state, replace(report, generation=state.generation))
    assert state.phase == Phase.RECOVERING
    return state


def test_all_wait_for_owners_and_helpers() -> None:
    state = recovering()
    assert not state.round.ready
    assert state.missing() == ("C",)  # a helper is done when the owner is
    after_owner = step(state, ev.WorkerReady(rank=1, generation=state.generation))
    assert after_owner.phase == Phase.RECOVERING
    assert after_owner.missing() == ("A",)
    assert step(after_owner, ev.WorkerReady(rank=0, generation=state.generation)).phase == Phase.LIVE


def test_a_worker_that_declined_is_not_asked_again_in_this_recovery() -> None:
    state = recovering()
    state = step(state, ev.HelpDeclined(rank=0, generation=state.generation, reason="no room"))
    assert state.phase == Phase.AGREEING
    for report in job(2, {1}).values():
        state = step(state, replace(report, generation=state.generation))
    assert state.plan is not None
    assert state.plan.parallel_replays == ()
    assert set(state.round.ready) == {0}
    state = step(state, ev.WorkerReady(rank=1, generation=state.generation))
    assert state.phase == Phase.LIVE
    assert state.tries.no_helpers_reason is None


def test_a_late_refusal_changes_nothing() -> None:
    state = recovering()
    assert step(state, ev.HelpDeclined(rank=0, generation=state.generation - 1, reason="no room")) == state
