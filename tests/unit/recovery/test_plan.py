"""The plan of a recovery (paper sections 3 and 5.1): a table of cases, and properties of all plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.plan import Plan, RecoveryMode, Task, make_plan
from swift_ft.recovery.reconcile import Transfer


def live(at: int, *, dirty: str | None = None, known: bool = True, can_resend: bool = True) -> StatusReported:
    return StatusReported(
        rank=0,
        generation=1,
        iteration=at,
        live=True,
        stages=(),
        pipeline_known=known,
        dirty=dirty,
        can_resend=can_resend,
    )


def replaying(at: int) -> StatusReported:
    return StatusReported(rank=0, generation=1, iteration=at, live=False, stages=(), pipeline_known=True)


NEW = StatusReported(rank=0, generation=1, iteration=None, live=False, stages=(), pipeline_known=True)


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
    *statuses: StatusReported,
    workers: int = 1,
    committed: int | None = 20,
    why: str | None = None,
    layout: Callable[[int], list[tuple[int, ...]]] = in_order,
) -> Plan:
    stages = layout(len(statuses))
    reports = {rank: replace(s, rank=rank, stages=stages[rank]) for rank, s in enumerate(statuses)}
    return make_plan(reports, workers_per_machine=workers, committed=committed, fallback_reason=why)


def beside(stages: Sequence[tuple[int, ...]], rank: int) -> set[int]:
    """The ranks with which one exchanges messages."""
    near = {stage + step for stage in stages[rank] for step in (-1, +1)}
    return {other for other, held in enumerate(stages) if near & {*held}} - {rank}


REPLAY_47 = Task(20, 20, 47)


def jointly(*replay_group: int, load: int | None = 20, begin: int = 20, until: int = 47) -> dict[int, Task]:
    return dict.fromkeys(replay_group, Task(load, begin, until, replay_group=replay_group))


CASES = {
    "first start": (pipeline(NEW, NEW, committed=None), RecoveryMode.START, 0, {0: Task(None, 0, 0)}),
    "resumed": (pipeline(NEW, NEW), RecoveryMode.START, 20, {0: Task(20, 20, 20), 1: Task(20, 20, 20)}),
    "all alive": (pipeline(live(47), live(47)), RecoveryMode.CONTINUE, 47, {0: Task(None, 47, 47)}),
    "one ahead": (
        pipeline(live(47), live(48)),
        RecoveryMode.CONTINUE,
        47,
        {1: Task(None, 48, 47, resend_from_log=True)},
    ),
    "first lost": (pipeline(NEW, live(47), live(47)), RecoveryMode.REPLAY, 47, {0: REPLAY_47}),
    "middle lost": (pipeline(live(47), NEW, live(47)), RecoveryMode.REPLAY, 47, {1: REPLAY_47}),
    "last lost": (pipeline(live(47), live(47), NEW), RecoveryMode.REPLAY, 47, {2: REPLAY_47}),
    "lost, and one ahead": (
        pipeline(live(47), NEW, live(48)),
        RecoveryMode.REPLAY,
        47,
        {1: REPLAY_47, 2: Task(None, 48, 47, resend_from_log=True)},
    ),
    "two that are no neighbours": (
        pipeline(NEW, live(47), NEW, live(47)),
        RecoveryMode.REPLAY,
        47,
        {0: REPLAY_47, 2: REPLAY_47},
    ),
    "in the middle of a replay": (
        pipeline(live(47), replaying(31), live(47)),
        RecoveryMode.REPLAY,
        47,
        {1: Task(None, 31, 47)},
    ),
    "two neighbours": (
        pipeline(live(47), NEW, NEW, live(47)),
        RecoveryMode.REPLAY,
        47,
        {0: Task(None, 47, 47), 3: Task(None, 47, 47)} | jointly(1, 2),
    ),
    "two neighbours, one alone, and one ahead": (
        pipeline(NEW, NEW, live(47), NEW, live(48)),
        RecoveryMode.REPLAY,
        47,
        {3: REPLAY_47, 4: Task(None, 48, 47, resend_from_log=True)} | jointly(0, 1),
    ),
    "two replay groups": (
        pipeline(NEW, NEW, live(47), NEW, NEW),
        RecoveryMode.REPLAY,
        47,
        jointly(0, 1) | jointly(3, 4),
    ),
    "all but one": (pipeline(NEW, NEW, NEW, live(47)), RecoveryMode.REPLAY, 47, jointly(0, 1, 2)),
    "a neighbour of a replay": (
        pipeline(live(47), replaying(31), NEW),
        RecoveryMode.REPLAY,
        47,
        jointly(1, 2),
    ),
    "in the middle of a joint replay": (
        pipeline(live(47), replaying(31), replaying(31)),
        RecoveryMode.REPLAY,
        47,
        jointly(1, 2, load=None, begin=31),
    ),
    "apart in the middle of a joint replay": (
        pipeline(live(47), replaying(31), replaying(32)),
        RecoveryMode.REPLAY,
        47,
        jointly(1, 2),
    ),
    "a joint replay that has ended for one": (
        pipeline(live(47), live(47), replaying(46)),
        RecoveryMode.REPLAY,
        47,
        {1: Task(None, 47, 47), 2: Task(None, 46, 47)},
    ),
    "two neighbours at the checkpoint": (
        pipeline(live(20), NEW, NEW),
        RecoveryMode.REPLAY,
        20,
        {0: Task(None, 20, 20)} | jointly(1, 2, until=20),
    ),
    "the ends of a loop": (
        pipeline(NEW, live(47), NEW, layout=in_a_loop),
        RecoveryMode.REPLAY,
        47,
        {1: Task(None, 47, 47)} | jointly(0, 2),
    ),
    "nothing committed": (pipeline(live(3), NEW, committed=None), RecoveryMode.RESTART, 0, {}),
    "two neighbours, nothing committed": (
        pipeline(live(3), NEW, NEW, committed=None),
        RecoveryMode.RESTART,
        0,
        {},
    ),
    "behind the checkpoint": (pipeline(live(19), live(20)), RecoveryMode.FALLBACK, 20, {0: Task(20, 20, 20)}),
    "dirty": (pipeline(live(47), live(47, dirty="Adam")), RecoveryMode.RESTART, 20, {}),
    "too far apart": (pipeline(live(47), live(49)), RecoveryMode.FALLBACK, 20, {1: Task(20, 20, 20)}),
    "no worker is complete": (
        pipeline(replaying(30), NEW, NEW),
        RecoveryMode.FALLBACK,
        20,
        {0: Task(20, 20, 20)},
    ),
    "must fall back": (
        pipeline(live(47), live(47), why="torn"),
        RecoveryMode.FALLBACK,
        20,
        {0: Task(20, 20, 20)},
    ),
    "a machine of two": (
        pipeline(live(47), live(47), NEW, NEW, workers=2),
        RecoveryMode.REPLAY,
        47,
        jointly(2, 3),
    ),
    "two machines of two": (
        pipeline(live(47), live(47), NEW, NEW, NEW, NEW, live(47), live(47), workers=2),
        RecoveryMode.REPLAY,
        47,
        jointly(2, 3, 4, 5),
    ),
    "half of a machine": (
        pipeline(live(47), live(47), live(47), NEW, workers=2),
        RecoveryMode.REPLAY,
        47,
        {0: Task(None, 47, 47), 1: Task(None, 47, 47)} | jointly(2, 3),
    ),
    "ahead inside a machine": (
        pipeline(live(47), live(48), workers=2),
        RecoveryMode.CONTINUE,
        47,
        {1: Task(None, 48, 47, resend_from_log=True)},
    ),
    "ahead, with nothing kept": (
        pipeline(live(47), live(48, can_resend=False)),
        RecoveryMode.FALLBACK,
        20,
        {},
    ),
    "ahead of another machine": (
        pipeline(live(47), live(47), live(48), live(48), workers=2),
        RecoveryMode.CONTINUE,
        47,
        {2: Task(None, 48, 47, resend_from_log=True), 3: Task(None, 48, 47, resend_from_log=True)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_plan(case: str) -> None:
    plan, mode, resume, tasks = CASES[case]
    assert (plan.mode, plan.resume) == (mode, resume)
    assert {rank: plan.tasks[rank] for rank in tasks} == tasks


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (pipeline(live(3), NEW, committed=None), "never in a checkpoint; no checkpoint is committed yet"),
        (pipeline(live(47), live(47, dirty="Adam")), "worker 1 stopped in the middle of an update: Adam"),
        (pipeline(live(47), live(49)), "2 iterations apart"),
        (pipeline(live(19), live(20)), "worker 0 is at iteration 19, before the committed checkpoint 20"),
        (pipeline(replaying(30), NEW, NEW), "no worker with a complete state"),
        (pipeline(replaying(48), live(47)), "worker 0 is at iteration 48, after the consensus"),
        (pipeline(live(47), live(47), why="segment 7 is torn"), "segment 7 is torn"),
        (
            pipeline(live(47), live(48, can_resend=False)),
            "worker 1 would have to resend iteration 47, but kept no copy",
        ),
        (pipeline(NEW, NEW, why="worker 3: ValueError"), "worker 3: ValueError"),
    ],
)
def test_a_dearer_mode_has_a_reason(plan: Plan, words: str) -> None:
    assert words in plan.reason


def test_the_cheapest_mode_needs_no_reason() -> None:
    assert pipeline(live(47), NEW, live(48)).reason == ""


def test_warm_up_is_live_unless_all_shapes_are_known() -> None:
    assert not pipeline(live(47), NEW).warm_up
    assert pipeline(live(47), live(47, known=False)).warm_up


def test_linked_stages_are_neighbours() -> None:
    """They share a parameter: lost at once, they have to send each other its gradient again."""
    statuses = (NEW, live(47), live(47), NEW)
    reports = {rank: replace(s, rank=rank, stages=(rank,)) for rank, s in enumerate(statuses)}
    assert make_plan(reports, workers_per_machine=1, committed=20).tasks[0] == REPLAY_47
    linked = {**reports, 0: replace(reports[0], linked=(3,)), 3: replace(reports[3], linked=(0,))}
    tasks = make_plan(linked, workers_per_machine=1, committed=20).tasks
    assert tasks[0] == tasks[3] == replace(REPLAY_47, replay_group=(0, 3))


def test_stages_on_one_worker_are_neighbours_without_a_message() -> None:
    """A V of four stages on two workers: stages 1 and 2 are both on worker 1."""
    reports = {
        0: StatusReported(rank=0, generation=1, iteration=47, live=True, stages=(0, 3), pipeline_known=True),
        1: StatusReported(
            rank=1, generation=1, iteration=None, live=False, stages=(1, 2), pipeline_known=True
        ),
    }
    assert make_plan(reports, workers_per_machine=1, committed=20).mode == RecoveryMode.REPLAY


STATUSES = st.one_of(
    st.just(NEW),
    st.integers(20, 24).map(live),
    st.integers(20, 24).map(replaying),
    st.integers(22, 23).map(live),
    st.integers(22, 23).map(lambda at: live(at, can_resend=False)),
)


@given(
    statuses=st.lists(STATUSES, min_size=1, max_size=6),
    committed=st.sampled_from((None, 20, 21)),
    workers=st.sampled_from((1, 2)),
    why=st.sampled_from((None, None, "torn")),
)
def test_every_plan(
    statuses: list[StatusReported], committed: int | None, workers: int, why: str | None
) -> None:
    if len(statuses) % workers:
        statuses = statuses[:-1] or [NEW, NEW]
    plan = pipeline(*statuses, workers=workers, committed=committed, why=why)
    rebuilt = rebuilt_of(statuses, workers)
    survivors = [s.iteration for r, s in enumerate(statuses) if r not in rebuilt and s.iteration is not None]
    if plan.mode == RecoveryMode.RESTART:
        assert committed is None
        assert plan.reason
        return
    assert set(plan.tasks) == set(range(len(statuses)))
    if plan.mode in (RecoveryMode.START, RecoveryMode.FALLBACK):
        assert plan.resume == (committed or 0)
        assert set(plan.tasks.values()) == {Task(committed, plan.resume, plan.resume)}
        assert plan.reason or plan.mode == RecoveryMode.START
        assert any(s.iteration is not None for s in statuses) == (plan.mode == RecoveryMode.FALLBACK)
        return
    assert plan.resume == min(survivors), "the consensus iteration is the minimum of the live survivors"
    assert why is None
    assert plan.reason == ""
    for rank, task in plan.tasks.items():
        status = statuses[rank]
        if status.live and rank not in rebuilt:
            assert (task.load, task.begin) == (None, status.iteration), "no survivor rolls back"
            assert not task.replay_group
        survives = status.live and rank not in rebuilt
        assert task.resend_from_log == (survives and status.iteration == plan.resume + 1)
        assert not task.resend_from_log or status.can_resend, "it kept what it sent"
        assert task.begin <= plan.resume or task.resend_from_log, "all workers reach the consensus iteration"
        fresh = status.iteration is None or status.live  # a replay that is under way keeps its logs
        assert not fresh or task.begin >= (committed or 0), "no plan needs a log from before the commit"
    assert (plan.mode == RecoveryMode.CONTINUE) == all(task.idle for task in plan.tasks.values())


@given(
    statuses=st.lists(STATUSES, min_size=1, max_size=8),
    committed=st.sampled_from((20, 21)),
    workers=st.sampled_from((1, 2)),
    layout=st.sampled_from((in_order, in_a_loop, in_a_v)),
)
def test_every_replay(
    statuses: list[StatusReported],
    committed: int,
    workers: int,
    layout: Callable[[int], list[tuple[int, ...]]],
) -> None:
    """Each message that a replay needs comes from the log of a survivor, or from one that replays with it."""
    if len(statuses) % workers:
        statuses = statuses[:-1] or [NEW, NEW]
    plan = pipeline(*statuses, workers=workers, committed=committed, layout=layout)
    if plan.mode != RecoveryMode.REPLAY or any(not s.live and s.iteration == plan.resume for s in statuses):
        return  # a worker that has caught up with the others would report that it is live
    stages = layout(len(statuses))
    rebuilt = rebuilt_of(statuses, workers)
    for rank in rebuilt:
        task, status, others = plan.tasks[rank], statuses[rank], beside(stages, rank)
        assert bool(task.replay_group) == bool(others & rebuilt), (
            "a worker in no replay group has no rebuilt neighbour"
        )
        assert (task.load, task.begin) in ((committed, committed), (None, status.iteration))
        assert task.replay_until == plan.resume
        assert task.replay_group in ((), connected(stages, rank, rebuilt))
        assert {plan.tasks[member].begin for member in task.replay_group or (rank,)} == {task.begin}
        alike = [statuses[member] for member in task.replay_group or (rank,)]
        if not any(s.live for s in alike) and {s.iteration for s in alike} == {status.iteration}:
            assert status.iteration is None or task.load is None, "what was replayed is kept"
        if task.begin < task.replay_until:
            for other in others - {*task.replay_group}:
                assert (statuses[other].iteration or 0) >= plan.resume, "it has sent all that is replayed"
                assert other // workers != rank // workers, "messages inside a machine are not logged"


def rebuilt_of(statuses: Sequence[StatusReported], workers: int) -> set[int]:
    """Workers without a complete state, and those on their machines: no log has the messages between them."""
    machines = {rank // workers for rank, status in enumerate(statuses) if not status.live}
    return {rank for rank in range(len(statuses)) if rank // workers in machines}


def connected(stages: Sequence[tuple[int, ...]], rank: int, among: set[int]) -> tuple[int, ...]:
    """The ranks beside a rank, directly or through others."""
    found, new = set[int](), {rank}
    while new:
        found |= new
        new = {other for at in new for other in beside(stages, at) & among} - found
    return tuple(sorted(found))


def pipelines(
    *rows: Sequence[StatusReported],
    committed: int = 20,
    log_gap_before: dict[int, int] | None = None,
    workers: int = 1,
) -> Plan:
    """Replicas of a pipeline, one row each; ranks count the stages of the first one first."""
    stages = len(rows[0])
    reports = {
        rank: replace(s, rank=rank, stages=(stage,), holds=(f"stage {stage}",), pipeline=number)
        for number, row in enumerate(rows)
        for stage, s in enumerate(row)
        for rank in (number * stages + stage,)
    }
    return make_plan(reports, workers_per_machine=workers, committed=committed, log_gap_before=log_gap_before)


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
        pipelines([NEW, AT, AT], [NEW, AT, AT], log_gap_before={1: 30}),
        47,
        jointly(0, 1, 3, 4),
        {},
    ),
    "a gap far from a replay": (
        pipelines([NEW, AT, AT], [NEW, AT, AT], log_gap_before={2: 30}),
        47,
        jointly(0, 3),
        {},
    ),
    "a gap from before what is replayed": (
        pipelines([replaying(31), AT], [replaying(31), AT], log_gap_before={1: 30}),
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
def test_plan_with_replicas(case: str) -> None:
    plan, resume, replayed, restored = REPLICATED[case]
    assert (plan.mode, plan.resume) == (RecoveryMode.REPLAY, resume), plan.reason
    assert {rank: task for rank, task in plan.tasks.items() if task.begin < task.replay_until} == replayed
    assert {rank: t.source for t in plan.transfers for rank in t.targets} == restored


@given(
    stages=st.integers(2, 4),
    statuses=st.lists(st.sampled_from([NEW, NEW, AT, AT, AT, CUT_OFF, replaying(30)]), min_size=8),
    log_gap_before=st.dictionaries(st.integers(0, 7), st.integers(21, 40)),
)
def test_every_replay_with_replicas(
    stages: int, statuses: list[StatusReported], log_gap_before: dict[int, int]
) -> None:
    """A replay finds all that it needs, and no worker needs two states."""
    rows = [statuses[:stages], statuses[stages : 2 * stages]]
    plan = pipelines(*rows, log_gap_before=log_gap_before)
    if plan.mode in (RecoveryMode.START, RecoveryMode.FALLBACK):
        return
    ranks = range(2 * stages)
    replayed = {rank for rank in ranks if plan.tasks[rank].begin < plan.resume}
    given_state = {rank: t.source for t in plan.transfers for rank in t.targets}
    assert plan.resume in (46, 47)
    for rank in ranks:
        task, own, replica = plan.tasks[rank], statuses[rank], (rank + stages) % (2 * stages)
        if rank in replayed:
            assert {rank, replica} <= {*task.replay_group}, "they need each other's gradients"
            assert len({plan.tasks[member].begin for member in task.replay_group}) == 1
            assert rank not in given_state
            assert replica not in given_state
            for other in {rank - 1, rank + 1} & {
                *range(rank // stages * stages, (rank // stages + 1) * stages)
            }:
                if other not in task.replay_group:
                    assert (statuses[other].iteration or 0) >= plan.resume, "its log is whole at the end"
                    assert statuses[other].live
                    assert log_gap_before.get(other, 0) <= task.begin, "and at the beginning"
        elif rank in given_state:
            assert given_state[rank] == replica
            assert statuses[replica].live
        else:
            assert own.live
            assert own.iteration == plan.resume + task.resend_from_log


# ------------------------------------------------------------------- what the script communicates itself


def mesh(
    *statuses: StatusReported, tp: int, workers: int = 1, silent: Sequence[int] = (), committed: int = 20
) -> Plan:
    """Stages of several workers each, which replay together: rank ``stage * tp + part`` has a part of one.

    Args:
        statuses: one per rank.
        tp: workers per stage.
        workers: per machine.
        silent: ranks that do not know that they replay together with others.
        committed: the checkpoint.
    """
    reports = {}
    for rank, status in enumerate(statuses):
        stage, part = divmod(rank, tp)
        partners = tuple(stage * tp + other for other in range(tp) if other != part)
        reports[rank] = replace(
            status,
            rank=rank,
            stages=(stage,),
            holds=(f"stage {stage}'s part on worker {rank}",),
            pipeline=part,
            together=() if rank in silent else partners,
            together_reason="" if status.iteration is None else "train.py:7 calls reduce_scatter",
        )
    return make_plan(reports, workers_per_machine=workers, committed=committed)


def test_a_stage_of_a_machine_with_two_workers_is_replayed_by_both() -> None:
    """They are no neighbours in a pipeline: only what the script communicates connects them."""
    plan = mesh(live(47), live(47), NEW, NEW, live(47), live(47), tp=2, workers=2)
    assert plan.mode == RecoveryMode.REPLAY
    assert plan.tasks == dict.fromkeys((0, 1, 4, 5), Task(None, 47, 47)) | jointly(2, 3)


@pytest.mark.parametrize("silent", [(), (2,), (3,)])
def test_survivors_replay_together_with_what_is_lost(silent: tuple[int, ...]) -> None:
    """One report of a pair is enough: a replacement may not know of it yet, or a survivor."""
    plan = mesh(live(47), live(47), NEW, live(47), live(48), live(48), tp=2, silent=silent)
    assert plan.mode == RecoveryMode.REPLAY
    resending = dict.fromkeys((4, 5), Task(None, 48, 47, resend_from_log=True))
    assert plan.tasks == dict.fromkeys((0, 1), Task(None, 47, 47)) | resending | jointly(2, 3)


def test_workers_that_can_only_repeat_an_iteration_together_do_so() -> None:
    """One of them has completed the iteration that the other one has to repeat."""
    plan = mesh(live(47), live(47), live(47), live(48), live(48), live(48), tp=2)
    assert plan.mode == RecoveryMode.REPLAY
    resending = dict.fromkeys((4, 5), Task(None, 48, 47, resend_from_log=True))
    assert plan.tasks == dict.fromkeys((0, 1), Task(None, 47, 47)) | resending | jointly(2, 3)


def test_a_worker_undoes_what_those_that_it_repeats_with_have_not_completed() -> None:
    """All workers keep their state. The stage after it has completed the iteration, and sends it again."""
    ahead = replace(live(48), undoable=(0, 1))
    plan = mesh(live(47), live(47), live(47), ahead, live(48), live(48), tp=2)
    assert (plan.mode, plan.resume) == (RecoveryMode.REPLICA, 47)
    assert plan.tasks[3] == Task(None, 47, 47, undo=(0, 1), back=True)
    resending = dict.fromkeys((4, 5), Task(None, 48, 47, resend_from_log=True))
    assert plan.tasks == dict.fromkeys((0, 1, 2), Task(None, 47, 47)) | {3: plan.tasks[3]} | resending


def test_a_worker_that_is_replayed_undoes_nothing() -> None:
    """Its partner is lost: both go back to the checkpoint."""
    ahead = replace(live(48), undoable=(0, 1))
    plan = mesh(live(47), live(47), NEW, ahead, live(47), live(47), tp=2)
    assert plan.mode == RecoveryMode.REPLAY
    assert plan.tasks == dict.fromkeys((0, 1, 4, 5), Task(None, 47, 47)) | jointly(2, 3)


@pytest.mark.parametrize("undoable", [(), (0,)])
def test_replicated_parts_of_a_stage_undo_what_the_other_parts_have_not_completed(
    undoable: tuple[int, ...],
) -> None:
    """Ranks 0 and 2 hold one part of the stage, 1 and 3 the other one; 2 and 3 lose their machine."""
    statuses = {0: live(47), 1: replace(live(48), undoable=undoable), 2: NEW, 3: NEW}
    reports = {
        rank: replace(
            status,
            rank=rank,
            stages=(0,),
            holds=(f"stage 0's part on worker {rank % 2}",),
            pipeline=rank,
            together=(rank ^ 1,),
        )
        for rank, status in statuses.items()
    }
    plan = make_plan(reports, workers_per_machine=2, committed=20)
    assert plan.mode == (RecoveryMode.REPLICA if undoable else RecoveryMode.FALLBACK)
    if undoable:
        assert (plan.resume, plan.tasks[1].undo) == (47, (0,))
        assert {(t.source, t.targets) for t in plan.transfers} == {(0, (2,)), (1, (3,))}


def test_one_shard_that_goes_back_takes_those_along_that_repeat_the_iteration_with_it() -> None:
    """Of sharded replicas: one was cut off, so its part goes back, and so must the other shard."""
    undoable = replace(live(48), undoable=(0, 1))
    states = [live(47), live(47), NEW, NEW, undoable, undoable, live(47), undoable]
    reports = {
        rank: replace(
            status,
            rank=rank,
            stages=(rank // 4,),
            holds=(f"stage {rank // 4}, shard {rank % 2}",),
            together=(rank ^ 1,),
        )
        for rank, status in enumerate(states)
    }
    plan = make_plan(reports, workers_per_machine=2, committed=20)
    assert (plan.mode, plan.resume) == (RecoveryMode.REPLICA, 47), plan.reason
    assert [plan.tasks[rank].undo for rank in (5, 7)] == [(0, 1), (0, 1)]
    assert {(t.source, t.targets) for t in plan.transfers} == {(0, (2,)), (1, (3,)), (6, (4,))}


def test_if_all_replay_together_the_reason_names_the_call() -> None:
    plan = mesh(NEW, live(47), live(47), live(47), tp=4)
    assert plan.mode == RecoveryMode.FALLBACK
    assert plan.reason == "no worker with a complete state is left; train.py:7 calls reduce_scatter"


@given(
    st.lists(st.sampled_from([NEW, live(47), live(48), replaying(31)]), min_size=6, max_size=6),
    st.sets(st.integers(0, 5), max_size=3),
)
def test_nobody_repeats_without_those_whose_part_no_log_has(
    statuses: list[StatusReported], silent: set[int]
) -> None:
    """For any progress: all workers of a stage replay, in one group, or all keep their state."""
    for tp, workers in ((2, 1), (2, 2), (3, 1), (3, 3)):
        told = tuple(rank for rank in silent if rank % tp)  # the first of each stage always knows
        plan = mesh(*statuses, tp=tp, workers=workers, silent=told)
        if plan.mode not in (RecoveryMode.REPLAY, RecoveryMode.CONTINUE):
            continue
        for first in range(0, 6, tp):
            tasks = [plan.tasks[rank] for rank in range(first, first + tp)]
            assert len({replace(task, replay_group=()) for task in tasks}) == 1
            if tasks[0].replays:
                assert {*tasks[0].replay_group} >= {*range(first, first + tp)}
                assert len({task.replay_group for task in tasks}) == 1


def sharded(first: Sequence[StatusReported], last: Sequence[StatusReported]) -> Plan:
    """Two stages of two replicas of two shards (HSDP): rank ``4 * stage + 2 * replica + shard``."""
    reports = {}
    for rank, status in enumerate((*first, *last)):
        stage, replica, shard = rank // 4, rank // 2 % 2, rank % 2
        reports[rank] = replace(
            status,
            rank=rank,
            stages=(stage,),
            holds=(f"stage {stage}, shard {shard} of 2",),
            pipeline=2 * replica + shard,
            together=tuple(other for other in range(4 * stage, 4 * stage + 4) if other != rank),
        )
    return make_plan(reports, workers_per_machine=2, committed=20)


STAGE_47 = [live(47)] * 4
CAN_UNDO = replace(live(48), undoable=(0, 1))


def test_shards_of_a_stage_come_from_those_who_hold_the_same() -> None:
    for ahead in (STAGE_47, [live(48)] * 4):
        plan = sharded(ahead, [live(47), live(47), NEW, NEW])
        assert (plan.mode, plan.resume) == (RecoveryMode.REPLICA, 47)
        assert plan.transfers == (Transfer(4, (6,)), Transfer(5, (7,)))
        assert {plan.tasks[rank].resend_from_log for rank in range(4)} == {ahead is not STAGE_47}


def test_shards_that_are_ahead_of_the_others_of_their_stage() -> None:
    """They undo the iteration, since the others can only repeat it with them. If they cannot, all replay."""
    plan = sharded(STAGE_47, [CAN_UNDO, live(47), CAN_UNDO, NEW])
    assert (plan.mode, plan.resume) == (RecoveryMode.REPLICA, 47)
    assert plan.transfers == (Transfer(5, (7,)),)
    assert {rank: task.undo for rank, task in plan.tasks.items() if task.undo} == {4: (0, 1), 6: (0, 1)}
    plan = sharded(STAGE_47, [CAN_UNDO, live(47), live(48), NEW])
    assert plan.transfers == (Transfer(4, (6,)), Transfer(5, (7,)))
    plan = sharded(STAGE_47, [live(48), live(47), live(48), NEW])
    assert plan.mode == RecoveryMode.REPLAY
    assert plan.tasks == dict.fromkeys(range(4), Task(None, 47, 47)) | jointly(4, 5, 6, 7)


def test_all_replicas_of_a_shard_are_lost() -> None:
    plan = sharded(STAGE_47, [live(47), NEW, live(47), NEW])
    assert plan.mode == RecoveryMode.REPLAY
    assert plan.tasks == dict.fromkeys(range(4), Task(None, 47, 47)) | jointly(4, 5, 6, 7)


@given(st.lists(st.sampled_from([NEW, live(47), live(48), CAN_UNDO]), min_size=8, max_size=8))
def test_the_workers_of_a_sharded_stage_go_on_from_one_iteration(statuses: list[StatusReported]) -> None:
    plan = sharded(statuses[:4], statuses[4:])
    if plan.mode not in (RecoveryMode.REPLAY, RecoveryMode.REPLICA, RecoveryMode.CONTINUE):
        return
    for first in (0, 4):
        tasks = [plan.tasks[rank] for rank in range(first, first + 4)]
        assert len({(task.load, task.begin, task.resend_from_log) for task in tasks}) == 1
        assert len({task.replay_group for task in tasks}) == 1
        if not tasks[0].replays:  # then each has its own state, or gets it from one that holds the same
            given = {rank: transfer.source for transfer in plan.transfers for rank in transfer.targets}
            for rank in range(first, first + 4):
                source = given.get(rank, rank)
                assert source % 2 == rank % 2
                assert source // 4 == rank // 4
                assert (statuses[source].iteration or 0) - bool(plan.tasks[source].undo) == tasks[0].begin


def parts(at: int, done: int | None, due: int = 0) -> StatusReported:
    return replace(live(at), parts_done=done, parts_due=due)


@pytest.mark.parametrize(
    ("statuses", "parts_from"),
    [
        ((parts(47, None), parts(47, None)), None),
        ((parts(47, 1), parts(47, None)), 1),
        ((parts(47, 1), parts(47, 2), NEW), 1),
        ((NEW, parts(47, 0), parts(47, None)), 0),
        ((NEW, parts(47, None), parts(47, None)), None),
        ((NEW, parts(47, None, 2), parts(47, None, 2)), 0),  # the lost one may not have done its part of them
        ((NEW, parts(47, 1, 2), parts(47, None, 2)), 0),
        ((parts(47, None, 2), parts(47, None, 2)), None),
        ((NEW, parts(47, None, 2), parts(48, None, 0)), None),  # it had: all take part in a step
        ((parts(47, 0), parts(48, None)), None),  # it cannot go back
        ((parts(47, None), parts(48, 0)), None),  # nor is it needed: it comes there again
        ((NEW, NEW), None),  # a checkpoint comes after them
    ],
)
def test_parts_between_two_steps(statuses: tuple[StatusReported, ...], parts_from: int | None) -> None:
    assert pipeline(*statuses).parts_from == parts_from


def test_parts_that_a_checkpoint_has() -> None:
    """All have done them before they saved it, the lost one too, which begins with what followed."""
    statuses = NEW, parts(47, None, 2), parts(47, None, 2)
    assert pipeline(*statuses, committed=46).parts_from == 0
    assert pipeline(*statuses, committed=47).parts_from is None
