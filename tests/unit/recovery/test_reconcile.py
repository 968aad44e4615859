"""Reconciling replicas (paper sections 2.3 and 4): a table of cases, and properties of all results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.plan import Plan, RecoveryMode, Task, make_plan
from swift_ft.recovery.reconcile import Reconciliation, Transfer, reconcile_replicas
from swift_ft.recovery.topology import replica_sets

MODEL = ("the model",)
DIRTY = "communication failed after optimizer.step()"


def live(at: int, *updated: int, dirty: str | None = None) -> StatusReported:
    return StatusReported(
        rank=0,
        generation=1,
        iteration=at,
        live=True,
        stages=(),
        pipeline_known=True,
        dirty=dirty,
        holds=MODEL,
        updated=updated,
    )


NEW = StatusReported(
    rank=0, generation=1, iteration=None, live=False, stages=(), pipeline_known=True, dirty=None, holds=MODEL
)


def group(*statuses: StatusReported) -> dict[int, StatusReported]:
    """Replicas of one part, by rank."""
    return {
        rank: StatusReported(
            rank=rank,
            generation=1,
            iteration=s.iteration,
            live=s.live,
            stages=s.stages,
            pipeline_known=True,
            dirty=s.dirty,
            holds=s.holds,
            updated=s.updated,
        )
        for rank, s in enumerate(statuses)
    }


def whole(source: int, *targets: int) -> Transfer:
    return Transfer(source, targets)


RESULTS = {
    "all equal": (group(live(47), live(47)), Reconciliation(47)),
    "forward": (group(live(47), live(48)), Reconciliation(48, {}, (whole(1, 0),))),
    "forward, whatever the others have updated": (
        group(live(47, 0), live(48), live(47, 0, 1)),
        Reconciliation(48, {}, (whole(1, 0, 2),)),
    ),
    "forward from the first of several": (
        group(live(47), live(48), live(48)),
        Reconciliation(48, {}, (whole(1, 0),)),
    ),
    "a newcomer": (group(live(47), NEW), Reconciliation(47, {}, (whole(0, 1),))),
    "a newcomer in the first place": (group(NEW, live(47), live(47)), Reconciliation(47, {}, (whole(1, 0),))),
    "newcomers and one behind": (
        group(NEW, live(47), live(48), NEW),
        Reconciliation(48, {}, (whole(2, 0, 1, 3),)),
    ),
    "back by copy": (
        group(live(47, 0, 1), live(47)),
        Reconciliation(47, {0: (0, 1)}, (Transfer(1, (0,), (0, 1)),)),
    ),
    "back by copy, crosswise": (
        group(live(47, 0), live(47, 1)),
        Reconciliation(47, {0: (0,), 1: (1,)}, (Transfer(0, (1,), (1,)), Transfer(1, (0,), (0,)))),
    ),
    "one copy for several targets": (
        group(live(47, 0), live(47, 0), live(47)),
        Reconciliation(47, {0: (0,), 1: (0,)}, (Transfer(2, (0, 1), (0,)),)),
    ),
    "undo where all have updated": (group(live(47, 0), live(47, 0)), Reconciliation(47, {0: (0,), 1: (0,)})),
    "undo one, copy another": (
        group(live(47, 0, 1), live(47, 0)),
        Reconciliation(47, {0: (0, 1), 1: (0,)}, (Transfer(1, (0,), (1,)),)),
    ),
    "undo, then give to a newcomer": (
        group(NEW, live(47, 0), live(47, 0)),
        Reconciliation(47, {1: (0,), 2: (0,)}, (whole(1, 0),)),
    ),
    "copy before a newcomer gets it": (
        group(live(47, 0), live(47, 1), NEW),
        Reconciliation(
            47, {0: (0,), 1: (1,)}, (Transfer(0, (1,), (1,)), Transfer(1, (0,), (0,)), whole(0, 2))
        ),
    ),
    "a newcomer gets what is whole": (
        group(live(47, 0), live(47), NEW),
        Reconciliation(47, {0: (0,)}, (Transfer(1, (0,), (0,)), whole(1, 2))),
    ),
    "alone, with an undo": (group(live(47, 0, 1)), Reconciliation(47, {0: (0, 1)})),
    "alone": (group(live(47)), Reconciliation(47)),
    "one is half updated": (group(live(47, dirty=DIRTY), live(47)), Reconciliation(47, {}, (whole(1, 0),))),
    "one is half updated, the other can undo": (
        group(live(47, dirty=DIRTY), live(47, 0)),
        Reconciliation(47, {1: (0,)}, (whole(1, 0),)),
    ),
    "half updated, and later than the others": (
        group(live(48, dirty=DIRTY), live(47)),
        Reconciliation(47, {}, (whole(1, 0),)),
    ),
    "a whole state, and a later one in its update": (
        group(live(47), live(48, 0)),
        Reconciliation(47, {}, (whole(0, 1),)),
    ),
    "all are half updated": (group(live(47, dirty=DIRTY), live(47, dirty=DIRTY)), None),
    "all are new": (group(NEW, NEW), None),
    "half updated and new": (group(live(47, dirty=DIRTY), NEW), None),
}


@pytest.mark.parametrize("case", RESULTS)
def test_reconcile_replicas(case: str) -> None:
    statuses, expected_result = RESULTS[case]
    assert reconcile_replicas(statuses) == expected_result


def test_replicas_hold_the_same() -> None:
    part = {
        rank: StatusReported(rank=rank, generation=1, iteration=47, live=True, holds=(f"stage {rank % 2}",))
        for rank in range(4)
    }
    assert [sorted(g) for g in replica_sets(part)] == [[0, 2], [1, 3]]


def test_a_worker_that_holds_nothing_is_alone() -> None:
    """A session without a pipeline and without DDP may have to undo, too."""
    reports = {
        rank: StatusReported(rank=rank, generation=1, iteration=47, live=True, updated=(0,) * rank)
        for rank in range(2)
    }
    assert [sorted(g) for g in replica_sets(reports)] == [[0], [1]]
    plan = make_plan(reports, workers_per_machine=1, committed=20)
    assert (plan.mode, plan.transfers, plan.tasks[1].undo) == (RecoveryMode.REPLICA, (), (0,))


def test_the_ranks_of_a_transfer() -> None:
    assert whole(2, 3, 0).ranks == (0, 2, 3)


# ------------------------------------------------------------------------------------------------ plans


def plan_of(
    statuses: Mapping[int, StatusReported], committed: int | None = 20, why: str | None = None
) -> Plan:
    return make_plan(statuses, workers_per_machine=1, committed=committed, fallback_reason=why)


def stage(
    number: int, at: int | None, *updated: int, is_live: bool = True, dirty: str | None = None
) -> StatusReported:
    holds = (f"stage {number}",)
    return StatusReported(
        rank=0,
        generation=1,
        iteration=at,
        live=at is not None and is_live,
        stages=(number,),
        pipeline_known=True,
        dirty=dirty,
        holds=holds,
        updated=updated,
    )


def idle(at: int, *undo: int) -> Task:
    return Task(None, at, at, undo=undo)


PLANS = {
    "equal": (plan_of(group(live(47), live(47))), RecoveryMode.CONTINUE, 47, {0: idle(47)}),
    "lost": (plan_of(group(live(47), NEW)), RecoveryMode.REPLICA, 47, {0: idle(47), 1: idle(47)}),
    "lost, nothing committed": (plan_of(group(live(3), NEW), None), RecoveryMode.REPLICA, 3, {1: idle(3)}),
    "forward": (plan_of(group(live(47, 1), live(48))), RecoveryMode.REPLICA, 48, {0: idle(48), 1: idle(48)}),
    "undo": (
        plan_of(group(live(47, 1), live(47, 1))),
        RecoveryMode.REPLICA,
        47,
        {0: idle(47, 1), 1: idle(47, 1)},
    ),
    "half updated, all": (
        plan_of(group(live(47, dirty=DIRTY), live(47, dirty=DIRTY))),
        RecoveryMode.RESTART,
        20,
        {},
    ),
    "must fall back": (
        plan_of(group(live(47, 0), live(48)), why="torn"),
        RecoveryMode.FALLBACK,
        20,
        {0: Task(20, 20, 20)},
    ),
    "all lost": (plan_of(group(NEW, NEW)), RecoveryMode.START, 20, {0: Task(20, 20, 20)}),
    "half updated and new, nothing committed": (
        plan_of(group(live(3, dirty=DIRTY), NEW), None),
        RecoveryMode.RESTART,
        0,
        {},
    ),
    "a stage undoes its update, the other is behind it": (
        plan_of(group(stage(0, 47), stage(1, 47, 0, 1))),
        RecoveryMode.REPLICA,
        47,
        {0: idle(47), 1: idle(47, 0, 1)},
    ),
    "a stage undoes its update, another is replayed": (
        plan_of(group(stage(0, None), stage(1, 47, 0), stage(2, 47))),
        RecoveryMode.REPLAY,
        47,
        {0: Task(20, 20, 47), 1: idle(47, 0), 2: idle(47)},
    ),
    "a replica of one stage, a replay of another": (
        plan_of(group(stage(0, 47), stage(0, None), stage(1, 47), stage(2, None))),
        RecoveryMode.REPLAY,
        47,
        {0: idle(47), 1: idle(47), 2: idle(47), 3: Task(20, 20, 47)},
    ),
    "a half updated stage without a replica": (
        plan_of(group(stage(0, 47), stage(1, 47, dirty=DIRTY))),
        RecoveryMode.RESTART,
        20,
        {},
    ),
}


@pytest.mark.parametrize("case", PLANS)
def test_plan(case: str) -> None:
    plan, mode, resume, tasks = PLANS[case]
    assert (plan.mode, plan.resume) == (mode, resume)
    assert {rank: plan.tasks[rank] for rank in tasks} == tasks
    loads = mode in (RecoveryMode.START, RecoveryMode.FALLBACK, RecoveryMode.RESTART)
    assert not (loads and (plan.transfers or any(task.undo for task in plan.tasks.values())))


def test_the_replicas_of_every_part_are_made_equal() -> None:
    plan = plan_of(group(stage(0, 47), stage(0, None), stage(1, 47, 0), stage(1, 47)))
    assert plan.mode == RecoveryMode.REPLICA
    assert plan.transfers == (whole(0, 1), Transfer(3, (2,), (0,)))
    assert {rank: task.undo for rank, task in plan.tasks.items()} == {0: (), 1: (), 2: (0,), 3: ()}


def test_a_plan_says_why_no_replica_will_do() -> None:
    half = plan_of(group(live(47, dirty=DIRTY), NEW))
    assert "worker 0 stopped in the middle of an update" in half.reason
    nothing_logged = plan_of(
        {**group(live(47)), 1: StatusReported(rank=1, generation=1, iteration=None, holds=("another model",))}
    )
    assert (nothing_logged.mode, nothing_logged.reason) == (
        RecoveryMode.FALLBACK,
        "all replicas of another model are lost",
    )


def test_a_stage_that_cannot_resend_rolls_back_by_copy() -> None:
    """Rank 1 has completed iteration 47, its replica was interrupted in it, and so was the other stage."""
    plan = plan_of(group(stage(0, 47), stage(1, 48), stage(0, 47), stage(1, 47)))
    assert (plan.mode, plan.resume) == (RecoveryMode.REPLICA, 47)
    assert plan.transfers == (whole(3, 1),)
    assert not any(task.resend_from_log for task in plan.tasks.values())


def test_a_stage_that_can_neither_resend_nor_go_back() -> None:
    """The replica that was interrupted is lost."""
    plan = plan_of(group(stage(0, 47), stage(1, 48), stage(0, 47), stage(1, None)))
    assert plan.mode == RecoveryMode.FALLBACK
    assert "would have to resend iteration 47" in plan.reason


def test_a_stage_that_cannot_resend_undoes_what_it_completed() -> None:
    """The replica that was interrupted is lost, and the survivor can undo its last step."""
    ahead = replace(stage(1, 48), undoable=(0, 1, 2))
    statuses = group(stage(0, 47), stage(1, 48), stage(0, 47), stage(1, None))
    plan = plan_of({**statuses, 1: replace(ahead, rank=1)})
    assert (plan.mode, plan.resume) == (RecoveryMode.REPLICA, 47)
    assert plan.tasks[1] == Task(None, 47, 47, undo=(0, 1, 2), back=True)
    assert plan.transfers == (whole(1, 3),)


# ------------------------------------------------------------------------------------------- all of them

PARAMETERS = 3
Values = dict[int, tuple[str, ...]]
"""By parameter: the iterations that it contains, and an undo that may have left its roundings."""

INTERRUPTED = st.frozensets(st.integers(0, PARAMETERS - 1)).map(lambda found: live(47, *sorted(found)))
REPLICAS = st.lists(
    st.one_of(st.just(NEW), st.just(live(48)), INTERRUPTED, INTERRUPTED, st.just(live(47, dirty=DIRTY))),
    min_size=1,
    max_size=5,
).map(lambda statuses: group(*statuses))


def values_of(status: StatusReported) -> Values:
    """What a replica holds that reports this; one that is half updated holds anything."""
    if status.iteration is None or status.dirty:
        return dict.fromkeys(range(PARAMETERS), ("unknown",))
    done = status.iteration == 48
    return {p: ("47", "48") if done or p in status.updated else ("47",) for p in range(PARAMETERS)}


class Replicas:
    """Carries plans out on values, as workers do: what is undone once is not undone again."""

    def __init__(self, statuses: Mapping[int, StatusReported]) -> None:
        self.statuses = dict(statuses)
        self.values = {rank: values_of(s) for rank, s in statuses.items()}
        self._undone: set[tuple[int, int]] = set()

    def undo(self, plan: Plan) -> None:
        for rank, task in plan.tasks.items():
            for parameter in task.undo:
                if (rank, parameter) not in self._undone:
                    value = self.values[rank][parameter]
                    assert value[-1] == "48", "only an update that was made is undone"
                    self.values[rank][parameter] = (*value[:-1], "rounded")
                    self._undone.add((rank, parameter))

    def move(self, transfer: Transfer, targets: Iterable[int], resume: int) -> None:
        """To some of its targets; all that is left to say about them is what they report next."""
        assert transfer.source not in transfer.targets
        for target in targets:
            old, moved = self.statuses[target], transfer.parameters
            for parameter in range(PARAMETERS) if moved is None else moved:
                self.values[target][parameter] = self.values[transfer.source][parameter]
            updated = () if moved is None else tuple(p for p in old.updated if p not in moved)
            self.statuses[target] = StatusReported(
                rank=target,
                generation=2,
                iteration=resume,
                live=True,
                stages=(),
                pipeline_known=True,
                dirty=None,
                holds=MODEL,
                updated=updated,
            )

    def apply_transfers(self, plan: Plan, until: int | None = None) -> None:
        self.undo(plan)
        for transfer in plan.transfers[:until]:
            self.move(transfer, transfer.targets, plan.resume)


def expected(statuses: Mapping[int, StatusReported], resume: int) -> Values:
    """An original is kept or copied, where one is left."""
    if resume == 48:
        return dict.fromkeys(range(PARAMETERS), ("47", "48"))
    sound = [s for s in statuses.values() if s.live and not s.dirty]
    everywhere = set.intersection(*(set(s.updated) for s in sound))
    return {p: ("47", "rounded") if p in everywhere else ("47",) for p in range(PARAMETERS)}


@given(REPLICAS)
def test_replicas_are_equal_afterwards_and_nothing_is_lost(statuses: dict[int, StatusReported]) -> None:
    plan = plan_of(statuses)
    sound = [s for s in statuses.values() if s.live and not s.dirty]
    if not sound:
        anew = any(s.dirty for s in statuses.values() if s.iteration is not None)
        in_place = (RecoveryMode.START, RecoveryMode.FALLBACK)
        assert plan.mode in ((RecoveryMode.RESTART,) if anew else in_place)
        assert plan.transfers == ()
        return
    assert plan.mode in (RecoveryMode.CONTINUE, RecoveryMode.REPLICA), "one sound replica is enough"
    assert plan.resume == max(s.iteration or 0 for s in sound), "a completed iteration is never lost"
    assert set(plan.tasks) == set(statuses)
    assert all(task.idle and task.begin == plan.resume for task in plan.tasks.values())
    replicas = Replicas(statuses)
    replicas.apply_transfers(plan)
    assert all(values == expected(statuses, plan.resume) for values in replicas.values.values())


@given(REPLICAS)
def test_nothing_moves_that_need_not(statuses: dict[int, StatusReported]) -> None:
    result = reconcile_replicas(statuses)
    if result is None:
        return
    for transfer in result.transfers:
        if transfer.parameters is None:
            for target in transfer.targets:
                s = statuses[target]
                assert s.dirty or not s.live or s.iteration != result.iteration
        else:
            for target in transfer.targets:
                assert set(transfer.parameters) <= set(statuses[target].updated)
    moved = [
        (target, p) for t in result.transfers for target in t.targets for p in t.parameters or ("everything",)
    ]
    assert len(moved) == len(set(moved)), "nothing is sent twice"


@given(REPLICAS, st.integers(0, 4), st.integers(0, 4))
def test_an_interrupted_recovery_is_still_exact(
    statuses: dict[int, StatusReported], transfers: int, targets: int
) -> None:
    """A parameter that was undone is reported as updated until it is copied, so the originals stay known."""
    plan = plan_of(statuses)
    if plan.mode != RecoveryMode.REPLICA:
        return
    replicas = Replicas(statuses)
    replicas.apply_transfers(plan, until=transfers)
    for transfer in plan.transfers[transfers : transfers + 1]:  # some received it, then a worker died
        replicas.move(transfer, transfer.targets[:targets], plan.resume)
    second = plan_of(replicas.statuses)
    assert second.resume == plan.resume
    replicas.apply_transfers(second)
    assert all(values == expected(statuses, plan.resume) for values in replicas.values.values())
