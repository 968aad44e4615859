"""Who helps whom in a replay (paper §5.2): what holds for all ways to deal survivors out."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.recovery import events as ev
from swift_ft.recovery.events import Reported
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import make_plan
from swift_ft.recovery.protocol import step
from swift_ft.recovery.sharing import SharedReplay, share_replays


def job(ranks: int, lost: set[int], *, parts: int = 8, at: int = 25) -> dict[int, Reported]:
    """A pipeline with one stage a worker."""
    return {
        rank: Reported(
            rank, 1, None if rank in lost else at, rank not in lost, (rank,), pipeline_known=True, parts=parts
        )
        for rank in range(ranks)
    }


@pytest.mark.parametrize(
    ("lost", "parts", "expected"),
    [
        ({1}, 8, [SharedReplay((1,), (0, 2, 3, 4), 20, 25)]),
        ({1}, 3, [SharedReplay((1,), (0, 2), 20, 25)]),  # as many as there are microbatches
        ({1}, 1, []),
        ({1, 2}, 8, [SharedReplay((1, 2), (0, 3, 4), 20, 25)]),  # neighbours replay jointly
        ({1, 3}, 8, [SharedReplay((1,), (0, 4), 20, 25), SharedReplay((3,), (2,), 20, 25)]),
    ],
)
def test_cases(lost: set[int], parts: int, expected: list[SharedReplay]) -> None:
    plan = make_plan(job(5, lost, parts=parts), workers=1, committed=20)
    assert list(plan.shared) == expected


def test_who_reported_first_does_not_decide_who_helps() -> None:
    reports = dict(reversed(job(5, {1}, parts=3).items()))
    assert make_plan(reports, workers=1, committed=20).shared == (SharedReplay((1,), (0, 2), 20, 25),)


def test_nobody_helps_where_nothing_is_replayed() -> None:
    assert make_plan(job(5, {1}, at=20), workers=1, committed=20).shared == ()
    assert make_plan(job(5, set()), workers=1, committed=20).shared == ()


def test_nobody_helps_an_owner_that_cannot_be_helped() -> None:
    reports = job(5, {1})
    reports[1] = replace(reports[1], parts=1)
    assert make_plan(reports, workers=1, committed=20).shared == ()


@given(
    st.sets(st.integers(0, 11), min_size=1, max_size=11),
    st.lists(st.integers(1, 6), min_size=12, max_size=12),
    st.lists(st.integers(0, 1), min_size=12, max_size=12),
)
def test_everybody_helps_at_most_once_and_nobody_too_many(
    lost: set[int], parts: list[int], pipelines: list[int]
) -> None:
    reports = {
        rank: replace(report, parts=parts[rank], pipeline=pipelines[rank])
        for rank, report in job(12, lost).items()
    }
    replays = {(rank,): (20, 25) for rank in lost}
    free = [rank for rank in reports if rank not in lost]
    shared = share_replays(replays, reports, free)
    helpers = [rank for replay in shared for rank in replay.helpers]
    assert len(helpers) == len(set(helpers))
    assert set(helpers) <= set(free)
    for replay in shared:
        (owner,) = replay.owners
        assert 1 <= len(replay.helpers) < parts[owner]
        assert all(parts[rank] > 1 and pipelines[rank] == pipelines[owner] for rank in replay.helpers)
    for owner in (rank for (rank,) in replays if parts[rank] > 1):  # nobody is idle who could help
        mine = next((replay.helpers for replay in shared if owner in replay.owners), ())
        if len(mine) < parts[owner] - 1:
            able = {r for r in free if parts[r] > 1 and pipelines[r] == pipelines[owner]}
            assert able <= set(helpers)


@given(st.integers(1, 9), st.integers(1, 20))
def test_microbatches_are_dealt_out_evenly(members: int, microbatches: int) -> None:
    replay = SharedReplay((7,), tuple(range(10, 9 + members)), 0, 1)
    dealt = [list(replay.microbatches_of(rank, microbatches)) for rank in replay.members]
    assert sorted(index for share in dealt for index in share) == list(range(microbatches))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert len(replay.microbatches_of(7, microbatches)) == min(map(len, dealt))  # owners have more to do


@given(st.data(), st.integers(1, 9), st.integers(1, 20), st.integers(1, 3), st.booleans())
def test_a_sum_meets_all_microbatches_in_their_order(
    data: st.DataObject, helpers: int, microbatches: int, owners: int, begun: bool
) -> None:
    replay = SharedReplay(tuple(range(owners)), tuple(range(10, 10 + helpers)), 0, 1)
    order = data.draw(st.permutations(range(microbatches)))
    owner = data.draw(st.sampled_from(replay.owners))
    way = replay.legs(order, owner, begun=begun)
    assert [microbatch for leg in way for microbatch in leg.microbatches] == [*order]
    for leg in way:
        assert set(leg.microbatches) <= set(replay.microbatches_of(leg.rank, microbatches))
    assert way[-1].rank == owner
    assert not begun or way[0].rank == owner
    assert all(one.rank != other.rank for one, other in itertools.pairwise(way))


def test_the_usual_order_takes_one_leg_for_each_member() -> None:
    replay = SharedReplay((7,), (1, 2, 3), 0, 1)
    assert [leg.rank for leg in replay.legs(range(8), 7, begun=False)] == [1, 2, 3, 7]


def recovering() -> State:
    """Machine C has replaced B, which is to be replayed with the help of A."""
    state = State()
    events: list[ev.Event] = [ev.Opened(2, checkpoint=20), *map(ev.Joined, "AB")]
    events += [Reported(rank, 1, 25, True, (rank,), pipeline_known=True, parts=8) for rank in (0, 1)]
    events += [ev.Lost("B", "why"), ev.Joined("C")]
    for event in events:
        state = step(state, event)
    for report in job(2, {1}).values():
        state = step(state, replace(report, generation=state.generation))
    assert state.phase == Phase.RECOVERING
    return state


def test_everybody_waits_for_owners_and_helpers() -> None:
    state = recovering()
    assert state.ready == frozenset()
    assert state.missing() == ("C",)  # a helper is done when the owner is
    after_owner = step(state, ev.Ready(1, state.generation))
    assert after_owner.phase == Phase.RECOVERING
    assert after_owner.missing() == ("A",)
    assert step(after_owner, ev.Ready(0, state.generation)).phase == Phase.LIVE


def test_who_cannot_help_is_not_asked_again_in_this_recovery() -> None:
    state = recovering()
    state = step(state, ev.CannotHelp(0, state.generation, "no room"))
    assert state.phase == Phase.AGREEING
    for report in job(2, {1}).values():
        state = step(state, replace(report, generation=state.generation))
    assert state.plan is not None
    assert state.plan.shared == ()
    assert state.ready == {0}
    state = step(state, ev.Ready(1, state.generation))
    assert state.phase == Phase.LIVE
    assert state.unaided is None


def test_a_late_refusal_says_nothing() -> None:
    state = recovering()
    assert step(state, ev.CannotHelp(0, state.generation - 1, "no room")) == state
