"""Which way back (paper sections 3 and 5.1): a table of cases, and what holds for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.recovery.events import Reported
from swift_ft.recovery.plan import Plan, Task, Way, make_plan


def live(at: int, *, dirty: str | None = None, known: bool = True, serves: bool = True) -> Reported:
    return Reported(0, 1, at, True, (), known, dirty, serves=serves)


def replaying(at: int) -> Reported:
    return Reported(0, 1, at, False, (), True)


NEW = Reported(0, 1, None, False, (), True)


def in_order(ranks: int) -> list[tuple[int, ...]]:
    """The stages of each rank, one each."""
    return [(rank,) for rank in range(ranks)]


def in_a_loop(ranks: int) -> list[tuple[int, ...]]:
    """Two stages each, interleaved: the last rank is beside the first one, too."""
    return [(rank, rank + ranks) for rank in range(ranks)]


def in_a_v(ranks: int) -> list[tuple[int, ...]]:
    """Two stages each, down and up again: the last rank is beside itself."""
    return [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]


def pipeline(
    *standings: Reported,
    workers: int = 1,
    committed: int | None = 20,
    why: str | None = None,
    layout: Callable[[int], list[tuple[int, ...]]] = in_order,
) -> Plan:
    stages = layout(len(standings))
    reports = {rank: replace(s, rank=rank, stages=stages[rank]) for rank, s in enumerate(standings)}
    return make_plan(reports, workers=workers, committed=committed, must_fall_back=why)


def beside(stages: Sequence[tuple[int, ...]], rank: int) -> set[int]:
    """The ranks with which one exchanges messages."""
    near = {stage + step for stage in stages[rank] for step in (-1, +1)}
    return {other for other, held in enumerate(stages) if near & {*held}} - {rank}


REPLAY_47 = Task(20, 20, 47)


def jointly(*portion: int, load: int | None = 20, begin: int = 20, until: int = 47) -> dict[int, Task]:
    return dict.fromkeys(portion, Task(load, begin, until, portion=portion))


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
    "two neighbours": (
        pipeline(live(47), NEW, NEW, live(47)),
        Way.REPLAY,
        47,
        {0: Task(None, 47, 47), 3: Task(None, 47, 47)} | jointly(1, 2),
    ),
    "two neighbours, one alone, and one ahead": (
        pipeline(NEW, NEW, live(47), NEW, live(48)),
        Way.REPLAY,
        47,
        {3: REPLAY_47, 4: Task(None, 48, 47, serve=True)} | jointly(0, 1),
    ),
    "two portions": (pipeline(NEW, NEW, live(47), NEW, NEW), Way.REPLAY, 47, jointly(0, 1) | jointly(3, 4)),
    "all but one": (pipeline(NEW, NEW, NEW, live(47)), Way.REPLAY, 47, jointly(0, 1, 2)),
    "a neighbour of a replay": (pipeline(live(47), replaying(31), NEW), Way.REPLAY, 47, jointly(1, 2)),
    "in the middle of a joint replay": (
        pipeline(live(47), replaying(31), replaying(31)),
        Way.REPLAY,
        47,
        jointly(1, 2, load=None, begin=31),
    ),
    "apart in the middle of a joint replay": (
        pipeline(live(47), replaying(31), replaying(32)),
        Way.REPLAY,
        47,
        jointly(1, 2),
    ),
    "a joint replay that has ended for one": (
        pipeline(live(47), live(47), replaying(46)),
        Way.REPLAY,
        47,
        {1: Task(None, 47, 47), 2: Task(None, 46, 47)},
    ),
    "two neighbours at the checkpoint": (
        pipeline(live(20), NEW, NEW),
        Way.REPLAY,
        20,
        {0: Task(None, 20, 20)} | jointly(1, 2, until=20),
    ),
    "the ends of a loop": (
        pipeline(NEW, live(47), NEW, layout=in_a_loop),
        Way.REPLAY,
        47,
        {1: Task(None, 47, 47)} | jointly(0, 2),
    ),
    "nothing committed": (pipeline(live(3), NEW, committed=None), Way.RESTART, 0, {}),
    "two neighbours, nothing committed": (pipeline(live(3), NEW, NEW, committed=None), Way.RESTART, 0, {}),
    "behind the checkpoint": (pipeline(live(19), live(20)), Way.FALLBACK, 20, {0: Task(20, 20, 20)}),
    "dirty": (pipeline(live(47), live(47, dirty="Adam")), Way.FALLBACK, 20, {0: Task(20, 20, 20)}),
    "too far apart": (pipeline(live(47), live(49)), Way.FALLBACK, 20, {1: Task(20, 20, 20)}),
    "nobody complete": (pipeline(replaying(30), NEW, NEW), Way.FALLBACK, 20, {0: Task(20, 20, 20)}),
    "must fall back": (pipeline(live(47), live(47), why="torn"), Way.FALLBACK, 20, {0: Task(20, 20, 20)}),
    "a machine of two": (pipeline(live(47), live(47), NEW, NEW, workers=2), Way.REPLAY, 47, jointly(2, 3)),
    "two machines of two": (
        pipeline(live(47), live(47), NEW, NEW, NEW, NEW, live(47), live(47), workers=2),
        Way.REPLAY,
        47,
        jointly(2, 3, 4, 5),
    ),
    "half of a machine": (
        pipeline(live(47), live(47), live(47), NEW, workers=2),
        Way.REPLAY,
        47,
        {0: Task(None, 47, 47), 1: Task(None, 47, 47)} | jointly(2, 3),
    ),
    "ahead inside a machine": (
        pipeline(live(47), live(48), workers=2),
        Way.CONTINUE,
        47,
        {1: Task(None, 48, 47, serve=True)},
    ),
    "ahead, with nothing kept": (pipeline(live(47), live(48, serves=False)), Way.FALLBACK, 20, {}),
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
        (pipeline(live(3), NEW, committed=None), "never in a checkpoint; no checkpoint is committed yet"),
        (pipeline(live(47), live(47, dirty="Adam")), "worker 1 stopped in the middle of an update: Adam"),
        (pipeline(live(47), live(49)), "2 iterations apart"),
        (pipeline(live(19), live(20)), "worker 0 stands at iteration 19, before the committed checkpoint 20"),
        (pipeline(replaying(30), NEW, NEW), "no worker with a complete state"),
        (pipeline(replaying(48), live(47)), "worker 0 stands at iteration 48, after the consensus"),
        (pipeline(live(47), live(47), why="segment 7 is torn"), "segment 7 is torn"),
        (
            pipeline(live(47), live(48, serves=False)),
            "worker 1 would have to serve iteration 47, and",
        ),
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


def test_linked_stages_are_neighbours() -> None:
    """They share a parameter: lost at once, they have to send each other its gradient again."""
    standings = (NEW, live(47), live(47), NEW)
    reports = {rank: replace(s, rank=rank, stages=(rank,)) for rank, s in enumerate(standings)}
    assert make_plan(reports, workers=1, committed=20).tasks[0] == REPLAY_47
    linked = {**reports, 0: replace(reports[0], linked=(3,)), 3: replace(reports[3], linked=(0,))}
    tasks = make_plan(linked, workers=1, committed=20).tasks
    assert tasks[0] == tasks[3] == replace(REPLAY_47, portion=(0, 3))


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
    st.integers(22, 23).map(lambda at: live(at, serves=False)),
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
    rebuilt = rebuilt_of(standings, workers)
    survivors = [s.iteration for r, s in enumerate(standings) if r not in rebuilt and s.iteration is not None]
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
        if standing.live and rank not in rebuilt:
            assert (task.load, task.begin) == (None, standing.iteration), "nobody goes back"
            assert not task.portion
        survives = standing.live and rank not in rebuilt
        assert task.serve == (survives and standing.iteration == plan.resume + 1)
        assert not task.serve or standing.serves, "it has kept what it sent"
        assert task.begin <= plan.resume or task.serve, "everybody reaches the consensus iteration"
        fresh = standing.iteration is None or standing.live  # a replay that is under way keeps its logs
        assert not fresh or task.begin >= (committed or 0), "no plan needs a log from before the commit"
    assert (plan.way == Way.CONTINUE) == all(task.idle for task in plan.tasks.values())


@given(
    standings=st.lists(STANDINGS, min_size=1, max_size=8),
    committed=st.sampled_from((20, 21)),
    workers=st.sampled_from((1, 2)),
    layout=st.sampled_from((in_order, in_a_loop, in_a_v)),
)
def test_every_replay(
    standings: list[Reported],
    committed: int,
    workers: int,
    layout: Callable[[int], list[tuple[int, ...]]],
) -> None:
    """Each message that a replay needs comes from the log of a survivor, or from one that replays with it."""
    if len(standings) % workers:
        standings = standings[:-1] or [NEW, NEW]
    plan = pipeline(*standings, workers=workers, committed=committed, layout=layout)
    if plan.way != Way.REPLAY or any(not s.live and s.iteration == plan.resume for s in standings):
        return  # who stands where the others are is done with its replay, and reports that it is live
    stages = layout(len(standings))
    rebuilt = rebuilt_of(standings, workers)
    for rank in rebuilt:
        task, standing, others = plan.tasks[rank], standings[rank], beside(stages, rank)
        assert bool(task.portion) == bool(others & rebuilt), "who is in no portion has no rebuilt neighbour"
        assert (task.load, task.begin) in ((committed, committed), (None, standing.iteration))
        assert task.replay_until == plan.resume
        assert task.portion in ((), connected(stages, rank, rebuilt))
        assert {plan.tasks[member].begin for member in task.portion or (rank,)} == {task.begin}
        alike = [standings[member] for member in task.portion or (rank,)]
        if not any(s.live for s in alike) and {s.iteration for s in alike} == {standing.iteration}:
            assert standing.iteration is None or task.load is None, "what was replayed is kept"
        if task.begin < task.replay_until:
            for other in others - {*task.portion}:
                assert (standings[other].iteration or 0) >= plan.resume, "it has sent all that is replayed"
                assert other // workers != rank // workers, "messages inside a machine are not logged"


def rebuilt_of(standings: Sequence[Reported], workers: int) -> set[int]:
    """Who has no whole state, and who shares a machine with it: what they sent each other is in no log."""
    machines = {rank // workers for rank, standing in enumerate(standings) if not standing.live}
    return {rank for rank in range(len(standings)) if rank // workers in machines}


def connected(stages: Sequence[tuple[int, ...]], rank: int, among: set[int]) -> tuple[int, ...]:
    """Who is beside a rank, directly or through others."""
    found, new = set[int](), {rank}
    while new:
        found |= new
        new = {other for at in new for other in beside(stages, at) & among} - found
    return tuple(sorted(found))


def pipelines(
    *rows: Sequence[Reported], committed: int = 20, restored: dict[int, int] | None = None, workers: int = 1
) -> Plan:
    """Replicas of a pipeline, one row each; ranks count the stages of the first one first."""
    stages = len(rows[0])
    reports = {
        rank: replace(s, rank=rank, stages=(stage,), holds=(f"stage {stage}",), pipeline=number)
        for number, row in enumerate(rows)
        for stage, s in enumerate(row)
        for rank in (number * stages + stage,)
    }
    return make_plan(reports, workers=workers, committed=committed, restored=restored)


AT = live(47)
CUT_OFF = live(46)
HALF_UPDATED = replace(replaying(31), updated=(0,))

REPLICATED = {
    "a stage in all pipelines": (pipelines([AT, NEW, AT], [AT, NEW, AT]), 47, jointly(1, 4), {}),
    "neighbours in all pipelines": (pipelines([NEW, NEW, AT], [NEW, NEW, AT]), 47, jointly(0, 1, 3, 4), {}),
    "two stages apart": (
        pipelines([NEW, AT, NEW], [NEW, AT, NEW]),
        47,
        jointly(0, 3) | jointly(2, 5),
        {},
    ),
    "another stage has a replica": (
        pipelines([NEW, AT, AT, NEW], [NEW, AT, AT, AT]),
        47,
        jointly(0, 4),
        {3: 7},
    ),
    "a neighbour has a replica": (
        pipelines([AT, NEW, NEW, AT], [AT, NEW, AT, AT]),
        47,
        jointly(1, 2, 5, 6),
        {},
    ),
    "a neighbour has a replica, and so on": (
        pipelines([NEW, NEW, AT, AT, AT], [NEW, AT, NEW, AT, AT]),
        47,
        jointly(0, 1, 2, 5, 6, 7),
        {},
    ),
    "a neighbour's log has a gap": (
        pipelines([NEW, AT, AT], [NEW, AT, AT], restored={1: 30}),
        47,
        jointly(0, 1, 3, 4),
        {},
    ),
    "a gap far from a replay": (
        pipelines([NEW, AT, AT], [NEW, AT, AT], restored={2: 30}),
        47,
        jointly(0, 3),
        {},
    ),
    "a gap from before what is replayed": (
        pipelines([replaying(31), AT], [replaying(31), AT], restored={1: 30}),
        47,
        jointly(0, 2, load=None, begin=31),
        {},
    ),
    "a neighbour was cut off": (
        pipelines([NEW, AT, AT], [NEW, CUT_OFF, AT]),
        46,
        jointly(0, 3, until=46),
        {1: 4},
    ),
    "one far from the replay was cut off": (
        pipelines([NEW, AT, AT], [NEW, AT, CUT_OFF]),
        47,
        jointly(0, 3),
        {5: 2},
    ),
    "in the middle of an update": (
        pipelines([HALF_UPDATED, AT], [replaying(31), AT]),
        47,
        jointly(0, 2),
        {},
    ),
    "a machine with half of a pipeline": (
        pipelines([NEW, NEW, AT, AT], [NEW, NEW, AT, AT], workers=2),
        47,
        jointly(0, 1, 4, 5),
        {},
    ),
}


@pytest.mark.parametrize("case", REPLICATED)
def test_way_back_with_replicas(case: str) -> None:
    plan, resume, replayed, restored = REPLICATED[case]
    assert (plan.way, plan.resume) == (Way.REPLAY, resume), plan.reason
    assert {rank: task for rank, task in plan.tasks.items() if task.begin < task.replay_until} == replayed
    assert {rank: t.source for t in plan.transfers for rank in t.targets} == restored


@given(
    stages=st.integers(2, 4),
    standings=st.lists(st.sampled_from([NEW, NEW, AT, AT, AT, CUT_OFF, replaying(30)]), min_size=8),
    restored=st.dictionaries(st.integers(0, 7), st.integers(21, 40)),
)
def test_every_replay_with_replicas(stages: int, standings: list[Reported], restored: dict[int, int]) -> None:
    """Whatever a replay needs is there, and nobody has to have two states."""
    rows = [standings[:stages], standings[stages : 2 * stages]]
    plan = pipelines(*rows, restored=restored)
    if plan.way in (Way.START, Way.FALLBACK):
        return
    ranks = range(2 * stages)
    replayed = {rank for rank in ranks if plan.tasks[rank].begin < plan.resume}
    given_state = {rank: t.source for t in plan.transfers for rank in t.targets}
    assert plan.resume in (46, 47)
    for rank in ranks:
        task, own, replica = plan.tasks[rank], standings[rank], (rank + stages) % (2 * stages)
        if rank in replayed:
            assert {rank, replica} <= {*task.portion}, "they need each other's gradients"
            assert len({plan.tasks[member].begin for member in task.portion}) == 1
            assert rank not in given_state
            assert replica not in given_state
            for other in {rank - 1, rank + 1} & {
                *range(rank // stages * stages, (rank // stages + 1) * stages)
            }:
                if other not in task.portion:
                    assert (standings[other].iteration or 0) >= plan.resume, "its log is whole at the end"
                    assert standings[other].live
                    assert restored.get(other, 0) <= task.begin, "and at the beginning"
        elif rank in given_state:
            assert given_state[rank] == replica
            assert standings[replica].live
        else:
            assert own.live
            assert own.iteration == plan.resume + task.serve
