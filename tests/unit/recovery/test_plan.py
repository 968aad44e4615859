"""Which way back (paper sections 3 and 5.1): a table of cases, and what holds for all of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.recovery.events import Reported
from swift_ft.recovery.plan import Plan, Task, Way, make_plan


def live(at: int, *, dirty: str | None = None, known: bool = True) -> Reported:
    return Reported(0, 1, at, True, (), known, dirty)


def replaying(at: int) -> Reported:
    return Reported(0, 1, at, False, (), True)


NEW = Reported(0, 1, None, False, (), True)


def pipeline(
    *standings: Reported, workers: int = 1, committed: int | None = 20, why: str | None = None
) -> Plan:
    """One stage per rank, in order."""
    reports = {
        rank: Reported(rank, 1, s.iteration, s.live, (rank,), s.pipeline_known, s.dirty)
        for rank, s in enumerate(standings)
    }
    return make_plan(reports, workers=workers, committed=committed, must_fall_back=why)


REPLAY_47 = Task(20, 20, 47)
CASES = {
    "first start": (pipeline(NEW, NEW, committed=None), Way.START, 0, {0: Task(None, 0, 0)}),
    "resumed": (pipeline(NEW, NEW), Way.START, 20, {0: Task(20, 20, 20), 1: Task(20, 20, 20)}),
    "all alive": (pipeline(live(47), live(47)), Way.CONTINUE, 47, {0: Task(None, 47, 47)}),
    "one ahead": (pipeline(live(47), live(48)), Way.CONTINUE, 47, {1: Task(None, 48, 47, serve=True)}),
    "first lost": (pipeline(NEW, live(47), live(47)), Way.REPLAY, 47, {0: REPLAY_47}),
    "middle lost": (pipeline(live(47), NEW, live(47)), Way.REPLAY, 47, {1: REPLAY_47}),
    "last lost": (pipeline(live(47), live(47), NEW), Way.REPLAY, 47, {2: REPLAY_47}),
    "lost, and one ahead": (
        pipeline(live(47), NEW, live(48)),
        Way.REPLAY,
        47,
        {1: REPLAY_47, 2: Task(None, 48, 47, serve=True)},
    ),
    "two that are no neighbours": (
        pipeline(NEW, live(47), NEW, live(47)),
        Way.REPLAY,
        47,
        {0: REPLAY_47, 2: REPLAY_47},
    ),
    "in the middle of a replay": (
        pipeline(live(47), replaying(31), live(47)),
        Way.REPLAY,
        47,
        {1: Task(None, 31, 47)},
    ),
    "two neighbours": (pipeline(live(47), NEW, NEW, live(47)), Way.FALLBACK, 20, {0: Task(20, 20, 20)}),
    "a neighbour of a replay": (pipeline(live(47), replaying(31), NEW), Way.FALLBACK, 20, {}),
    "two neighbours at the checkpoint": (
        pipeline(live(20), NEW, NEW),
        Way.REPLAY,
        20,
        {0: Task(None, 20, 20), 1: Task(20, 20, 20)},
    ),
    "nothing committed": (pipeline(live(3), NEW, committed=None), Way.RESTART, 0, {}),
    "two neighbours, nothing committed": (pipeline(live(3), NEW, NEW, committed=None), Way.RESTART, 0, {}),
    "behind the checkpoint": (pipeline(live(19), live(20)), Way.FALLBACK, 20, {0: Task(20, 20, 20)}),
    "dirty": (pipeline(live(47), live(47, dirty="Adam")), Way.FALLBACK, 20, {0: Task(20, 20, 20)}),
    "too far apart": (pipeline(live(47), live(49)), Way.FALLBACK, 20, {1: Task(20, 20, 20)}),
    "nobody complete": (pipeline(replaying(30), NEW, NEW), Way.FALLBACK, 20, {0: Task(20, 20, 20)}),
    "must fall back": (pipeline(live(47), live(47), why="torn"), Way.FALLBACK, 20, {0: Task(20, 20, 20)}),
    "a machine of two": (pipeline(live(47), live(47), NEW, NEW, workers=2), Way.FALLBACK, 20, {}),
    "half of a machine": (pipeline(live(47), live(47), live(47), NEW, workers=2), Way.FALLBACK, 20, {}),
    "ahead inside a machine": (pipeline(live(47), live(48), workers=2), Way.FALLBACK, 20, {}),
    "ahead of another machine": (
        pipeline(live(47), live(47), live(48), live(48), workers=2),
        Way.CONTINUE,
        47,
        {2: Task(None, 48, 47, serve=True), 3: Task(None, 48, 47, serve=True)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_way_back(case: str) -> None:
    plan, way, resume, tasks = CASES[case]
    assert (plan.way, plan.resume) == (way, resume)
    assert {rank: plan.tasks[rank] for rank in tasks} == tasks


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (pipeline(live(47), NEW, NEW), "stages 1 and 2 are neighbours and both have to be rebuilt"),
        (pipeline(live(3), NEW, committed=None), "never in a checkpoint; no checkpoint is committed yet"),
        (pipeline(live(47), live(47, dirty="Adam")), "worker 1 stopped in the middle of an update: Adam"),
        (pipeline(live(47), live(49)), "2 iterations apart"),
        (pipeline(live(19), live(20)), "worker 0 stands at iteration 19, before the committed checkpoint 20"),
        (pipeline(replaying(30), NEW, NEW), "no worker with a complete state"),
        (pipeline(replaying(48), live(47)), "worker 0 stands at iteration 48, after the consensus"),
        (pipeline(live(47), live(47), why="segment 7 is torn"), "segment 7 is torn"),
        (pipeline(live(47), live(48), workers=2), "stages 0 and 1 stay inside a machine and are not logged"),
        (pipeline(NEW, NEW, why="worker 3: ValueError"), "worker 3: ValueError"),
    ],
)
def test_a_dearer_way_says_why(plan: Plan, words: str) -> None:
    assert words in plan.reason


def test_a_cheap_way_needs_no_reason() -> None:
    assert pipeline(live(47), NEW, live(48)).reason == ""


def test_warm_up_is_live_unless_all_shapes_are_known() -> None:
    assert not pipeline(live(47), NEW).warm_up
    assert pipeline(live(47), live(47, known=False)).warm_up


def test_stages_on_one_worker_are_neighbours_without_a_message() -> None:
    """A V of four stages on two workers: stages 1 and 2 are both on worker 1."""
    reports = {
        0: Reported(0, 1, 47, True, (0, 3), True),
        1: Reported(1, 1, None, False, (1, 2), True),
    }
    assert make_plan(reports, workers=1, committed=20).way == Way.REPLAY


STANDINGS = st.one_of(
    st.just(NEW),
    st.integers(20, 24).map(live),
    st.integers(20, 24).map(replaying),
    st.integers(22, 23).map(live),
)


@given(
    standings=st.lists(STANDINGS, min_size=1, max_size=6),
    committed=st.sampled_from((None, 20, 21)),
    workers=st.sampled_from((1, 2)),
    why=st.sampled_from((None, None, "torn")),
)
def test_every_plan(standings: list[Reported], committed: int | None, workers: int, why: str | None) -> None:
    if len(standings) % workers:
        standings = standings[:-1] or [NEW, NEW]
    plan = pipeline(*standings, workers=workers, committed=committed, why=why)
    survivors = [s.iteration for s in standings if s.live and s.iteration is not None]
    if plan.way == Way.RESTART:
        assert committed is None
        assert plan.reason
        return
    assert set(plan.tasks) == set(range(len(standings)))
    if plan.way in (Way.START, Way.FALLBACK):
        assert plan.resume == (committed or 0)
        assert set(plan.tasks.values()) == {Task(committed, plan.resume, plan.resume)}
        assert plan.reason or plan.way == Way.START
        assert any(s.iteration is not None for s in standings) == (plan.way == Way.FALLBACK)
        return
    assert plan.resume == min(survivors), "the consensus iteration is the minimum of the live survivors"
    assert why is None
    assert plan.reason == ""
    for rank, task in plan.tasks.items():
        standing = standings[rank]
        if standing.iteration is None:
            assert (task.load, task.begin) == (committed, committed)
        else:
            assert (task.load, task.begin) == (None, standing.iteration), "nobody goes back"
        assert task.serve == (standing.live and standing.iteration == plan.resume + 1)
        assert task.begin <= plan.resume or task.serve, "everybody reaches the consensus iteration"
        fresh = standing.iteration is None or standing.live  # a replay that is under way keeps its logs
        assert not fresh or task.begin >= (committed or 0), "no plan needs a log from before the commit"
    replayed = {rank for rank, task in plan.tasks.items() if task.begin < task.replay_until}
    for a, b in itertools.pairwise(range(len(standings))):
        unfit = [rank for rank in (a, b) if not standings[rank].live]
        assert not (len(unfit) == 2 and replayed & {a, b}), "a replay is fed by survivors' logs"
        if a // workers == b // workers:
            assert not replayed & {a, b}, "messages inside a machine are not logged"
            assert plan.tasks[a].serve == plan.tasks[b].serve
    assert (plan.way == Way.CONTINUE) == all(task.idle for task in plan.tasks.values())
