"""What a worker's core must do, as functions of its class: `test_mutants.py` gives them faulty ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from immutables import Map

from swift_ft.errors import (
    CheckpointError,
    DivergenceError,
    IncompleteStateError,
    JobEndedError,
    RecoveryError,
    UnsupportedError,
)
from swift_ft.faults import failpoints
from swift_ft.recovery import events as ev
from swift_ft.recovery.helpers import ParallelReplay
from swift_ft.recovery.orders import WorkerOrder
from swift_ft.recovery.plan import RecoveryMode, Task
from swift_ft.recovery.reconcile import Transfer
from swift_ft.runtime.worker.core import WorkerCore
from swift_ft.runtime.worker.ports import Judgement
from swift_ft.runtime.worker.status import WorkerStatus
from tests.unit.runtime.worker.surroundings import RANK, Surroundings, a_state, of_task

Core = type[WorkerCore]
Check = Callable[[Core], None]

CHECKS: list[Check] = []

STAY = Task(load=None, begin=4, replay_until=4)
LOAD = Task(load=2, begin=2, replay_until=2)
REPLAY = Task(load=2, begin=2, replay_until=4)
GO_LIVE = ["prepare 4", "open 4 in 1", "enter 1", "join 1", "live 1"]


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def runs(core: Core, plan: Any, **answers: Any) -> Surroundings:
    """A worker that is about to go live, at iteration 4."""
    around = Surroundings(core, orders=[(WorkerOrder.RUN, a_state(1, plan))], **answers)
    around.status.iteration, around.status.known = 4, True
    return around


# ----------------------------------------------------------------------------------------------- recovery


@check
def it_leaves_its_group_reports_does_its_task_and_goes_live(core: Core) -> None:
    plan = of_task(STAY)
    orders = [
        (WorkerOrder.REPORT, a_state(2, asked_in=2)),
        (WorkerOrder.EXECUTE, a_state(2, plan, asked_in=2)),
        (WorkerOrder.RUN, a_state(2, plan, asked_in=2)),
    ]
    around = Surroundings(core, orders=orders)
    around.status = around.core.status
    around.status.iteration, around.status.known = 4, True
    assert around.says(around.core.recover()) == [
        *("leave generation", f"order {WorkerOrder.REPORT}"),
        *("withdraw", "settle 2", "end replay", "flush notes", "report", "append StatusReported"),
        f"order {WorkerOrder.EXECUTE}",
        *("open 4 in 2", "append WorkerReady"),
        f"order {WorkerOrder.RUN}",
        *("prepare 4", "open 4 in 2", "enter 2", "join 1", "live 2"),
    ]
    assert around.core.generation == 2
    assert around.status == WorkerStatus(4, known=True, fresh=False, recoveries=1)
    assert around.events[1] == ev.WorkerReady(rank=RANK, generation=2, received=7)


@check
def no_iteration_is_the_next_one_in_a_recovery(core: Core) -> None:
    """Whoever waited for the others' end has named the one that would have come."""
    around = live(core, generation_over=[False, True])
    assert "-> False" in around.says(around.core.stops_for_layout())
    assert around.core.next == 4
    ends_in_recovery(around, around.core.finish())
    assert around.core.next is None


@check
def a_report_says_what_the_state_is(core: Core) -> None:
    around = Surroundings(core, orders=[(WorkerOrder.REPORT, a_state(3)), (WorkerOrder.RUN, a_state(3))])
    around.status.known, around.status.iteration, around.status.dirty = True, 6, "half"
    around.status.updated, around.status.steps, around.status.parts_done = (1,), 9, 2
    reports(around)
    assert around.events == [
        ev.StatusReported(
            rank=RANK,
            generation=3,
            iteration=6,
            live=True,
            pipeline_known=True,
            dirty="half",
            updated=(1,),
            can_resend=False,
            steps=9,
            parts_done=2,
            holds=("the model",),
        )
    ]
    assert "idle" not in around.said


def reports(around: Surroundings) -> None:
    """Only the report: what comes then has no plan."""
    with pytest.raises(AssertionError) as missing:
        around.says(around.core.recover())
    assert not missing.value.args  # that of a plan which is missing


@check
def without_a_state_a_report_has_no_iteration(core: Core) -> None:
    around = Surroundings(core, orders=[(WorkerOrder.REPORT, a_state(3)), (WorkerOrder.RUN, a_state(3))])
    around.status.iteration = 6
    reports(around)
    (report,) = around.events
    assert isinstance(report, ev.StatusReported)
    assert (report.iteration, report.live) == (None, False)


@check
def a_state_that_others_have_left_behind_is_not_live(core: Core) -> None:
    around = Surroundings(core, orders=[(WorkerOrder.REPORT, a_state(3)), (WorkerOrder.RUN, a_state(3))])
    around.status.known, around.behind = True, True
    reports(around)
    (report,) = around.events
    assert isinstance(report, ev.StatusReported)
    assert (report.iteration, report.live) == (0, False)


@check
def who_waits_for_others_prepares_what_may_be_needed(core: Core) -> None:
    orders = [(WorkerOrder.REPORT, a_state(3)), (WorkerOrder.RUN, a_state(3))]
    around = Surroundings(core, orders=orders, order=WorkerOrder.HOLD)
    reports(around)
    assert around.said[-2:] == ["idle", f"order {WorkerOrder.RUN}"]


@check
def nobody_needs_the_state_with_which_another_world_begins(core: Core) -> None:
    for since in (0, 1):
        state = a_state(3, since=since)
        around = Surroundings(core, orders=[(WorkerOrder.REPORT, state), (WorkerOrder.RUN, state)])
        around.answers["order"], around.state = WorkerOrder.HOLD, state
        reports(around)
        assert ("idle" in around.said) == (since == 1)


@check
def it_loads_what_its_task_names(core: Core) -> None:
    plan = of_task(LOAD)
    orders = [(WorkerOrder.EXECUTE, a_state(2, plan)), (WorkerOrder.RUN, a_state(2, plan))]
    around = Surroundings(core, orders=orders)
    status = around.status
    status.iteration, status.known, status.dirty, status.updated, status.parts_done = 5, True, "half", (1,), 1
    assert around.says(around.core.recover())[2:6] == [
        *("load 2 at 5, known: False", "open 2 in 2", "append WorkerReady"),
        f"order {WorkerOrder.RUN}",
    ]
    assert status == WorkerStatus(2, known=True, fresh=False, recoveries=1)


@check
def what_is_dirty_stays_so_until_it_is_loaded_or_made_equal(core: Core) -> None:
    around = Surroundings(core, orders=[(WorkerOrder.EXECUTE, a_state(2, of_task(STAY)))])
    around.status.dirty, around.status.updated, around.status.parts_done = "half", (1,), 1
    stops_after_its_orders(around)
    assert around.status == WorkerStatus(4, True, True, "half", (1,), parts_done=1)


def stops_after_its_orders(around: Surroundings) -> list[str]:
    """What it does until it asks for an order that does not come."""
    with pytest.raises(IndexError):  # else there was a step to run
        around.says(around.core.recover())
    return around.said


@check
def a_load_that_fails_is_reported_and_the_next_order_awaited(core: Core) -> None:
    for error in (RecoveryError("torn"), CheckpointError("damaged")):
        around = Surroundings(core, orders=[(WorkerOrder.EXECUTE, a_state(2, of_task(LOAD)))], load=error)
        around.status.dirty = "half"
        assert stops_after_its_orders(around)[2:] == [
            *("load 2 at 0, known: False", "end replay", "append ReplayFailed without a state")
        ]
        assert around.events == [ev.ReplayFailed(rank=RANK, generation=2, reason=str(error))]
        assert (around.status.known, around.status.dirty, around.status.fresh) == (False, "half", False)


@check
def an_error_of_the_script_is_no_failed_task(core: Core) -> None:
    around = Surroundings(core, orders=[(WorkerOrder.EXECUTE, a_state(2, of_task(LOAD)))], load=OSError("x"))
    with pytest.raises(OSError, match="x"):
        around.says(around.core.recover())
    assert not around.events


@check
def a_replay_is_a_step_to_run(core: Core) -> None:
    around = Surroundings(core, orders=[(WorkerOrder.EXECUTE, a_state(2, of_task(REPLAY)))])
    around.status.dirty, around.status.updated = "half", (1,)
    assert around.says(around.core.recover())[2:] == [
        *("load 2 at 0, known: False", "open 2 in 2", "replay until 4"),
    ]
    assert around.status == WorkerStatus(2, known=True, fresh=False)
    assert not around.events
    assert (around.core.generation, around.status.iteration) == (2, 2)


@check
def a_replay_that_does_not_begin_waits_for_another_order(core: Core) -> None:
    orders = [(WorkerOrder.EXECUTE, a_state(2, of_task(REPLAY)))]
    around = Surroundings(core, orders=orders, replay=False)
    assert stops_after_its_orders(around)[-1] == "replay until 4"
    around = Surroundings(
        core, orders=[(WorkerOrder.EXECUTE, a_state(2, of_task(REPLAY)))], replay=RecoveryError("torn")
    )
    assert stops_after_its_orders(around)[-2:] == ["end replay", "append ReplayFailed"]


@check
def a_helper_computes_and_keeps_its_own_state(core: Core) -> None:
    shared = (ParallelReplay(owners=(0,), helpers=(RANK,), begin=2, until=4),)
    for done, then in ((True, ["append WorkerReady"]), (False, [])):
        plan = of_task(STAY, parallel_replays=shared)
        around = Surroundings(core, orders=[(WorkerOrder.EXECUTE, a_state(2, plan))], help=done)
        around.status.iteration, around.status.known = 4, True
        assert stops_after_its_orders(around)[2:] == ["help 4", *then]
        assert around.status.iteration == 4


@check
def an_owner_of_a_shared_replay_replays(core: Core) -> None:
    shared = (ParallelReplay(owners=(RANK,), helpers=(0,), begin=2, until=4),)
    plan = of_task(REPLAY, parallel_replays=shared)
    around = Surroundings(core, orders=[(WorkerOrder.EXECUTE, a_state(2, plan))])
    assert around.says(around.core.recover())[-1] == "replay until 4"


@check
def layers_move_before_anything_is_loaded(core: Core) -> None:
    loaded = ["load 2 at 0, known: False", "open 2 in 2", "append WorkerReady"]
    for moved, then in ((True, loaded), (False, [])):
        plan = of_task(LOAD, new_layout=(1, 2))
        around = Surroundings(core, orders=[(WorkerOrder.EXECUTE, a_state(2, plan))], move=moved)
        assert stops_after_its_orders(around)[2:] == ["move 2", *then]


# ------------------------------------------------------------------------------------------------ go live


@check
def it_forms_the_group_only_when_all_is_prepared(core: Core) -> None:
    around = runs(core, of_task(STAY))
    assert around.says(around.core.recover())[2:] == GO_LIVE
    assert around.status.recoveries == 1


@check
def a_start_is_no_recovery(core: Core) -> None:
    around = runs(core, of_task(STAY, RecoveryMode.START))
    around.says(around.core.recover())
    assert around.status.recoveries == 0


@check
def a_group_that_is_not_formed_waits_for_another_order(core: Core) -> None:
    around = runs(core, of_task(STAY), enter=False)
    assert stops_after_its_orders(around)[2:] == GO_LIVE[:3]


@check
def an_exchange_that_breaks_off_is_a_broken_connection(core: Core) -> None:
    around = runs(core, of_task(STAY), join="peer gone")
    around.status.dirty = "half"
    assert stops_after_its_orders(around)[2:] == [*GO_LIVE[:4], "broken peer gone"]
    assert around.status.dirty == "half"


@check
def what_its_script_began_with_is_there_until_something_comes(core: Core) -> None:
    state = Transfer(source=0, targets=(RANK,))
    for transfers, fresh in (((), True), ((state,), False)):
        around = Surroundings(
            core,
            orders=[
                (WorkerOrder.RUN, a_state(1, of_task(STAY, RecoveryMode.START, transfers=transfers))),
                (WorkerOrder.REPORT, a_state(2)),
                (WorkerOrder.RUN, a_state(2)),
            ],
            join=["peer gone"],
        )
        reports(around)
        (report,) = around.events
        assert isinstance(report, ev.StatusReported)
        assert (report.iteration, report.fresh) == (None, fresh)
    around = runs(core, of_task(STAY, transfers=(state,)), enter=False)
    stops_after_its_orders(around)
    assert around.status.fresh
    around = runs(core, of_task(STAY), join=["peer gone"])
    around.status.fresh = False  # its state is one that came, or was trained
    stops_after_its_orders(around)
    assert not around.status.fresh


@check
def what_cannot_be_prepared_or_used_is_a_failed_task(core: Core) -> None:
    for moment in ("prepare", "join"):
        around = runs(core, of_task(STAY), **{moment: RecoveryError("no undo")})
        assert stops_after_its_orders(around)[-3:] == ["leave", "end replay", "append ReplayFailed"]
        assert around.events == [ev.ReplayFailed(rank=RANK, generation=1, reason="no undo")]


@check
def after_the_exchange_the_state_is_whole(core: Core) -> None:
    around = runs(core, of_task(STAY))
    around.status.dirty, around.status.updated, around.status.known = "half", (1,), False
    assert around.says(around.core.recover())[-1] == "live 1"  # and no longer "half"
    assert around.status == WorkerStatus(4, known=True, fresh=False, recoveries=1)


@check
def the_first_checkpoint_comes_before_the_first_step(core: Core) -> None:
    for mode, committed, saved in (
        (RecoveryMode.START, None, True),
        (RecoveryMode.MEMORY, None, True),
        (RecoveryMode.REPLAY, None, False),
        (RecoveryMode.START, 0, False),
    ):
        plan = of_task(STAY, mode)
        around = Surroundings(core, orders=[(WorkerOrder.RUN, a_state(1, plan, committed=committed))])
        around.status.iteration = 4
        assert ("save 4" in around.says(around.core.recover())) == saved, (mode, committed)


@check
def another_layout_is_saved_at_once(core: Core) -> None:
    around = runs(core, of_task(STAY, new_layout=(1, 2)))
    assert around.says(around.core.recover())[-1] == "save 4"


@check
def what_is_due_is_saved_again_if_its_own_part_does_not_count(core: Core) -> None:
    for due, revoked, saved in ((4, True, True), (4, False, False), (5, True, False)):
        around = runs(core, of_task(STAY), due={due})
        order, state = around.orders[0]
        marks: Any = Map({(4, RANK): 1}) if revoked else Map()
        around.orders = [(order, replace(state, checkpoints=replace(state.checkpoints, revoked=marks)))]
        assert ("save 4" in around.says(around.core.recover())) == saved


@check
def one_that_is_ahead_of_the_others_saves_nothing_again(core: Core) -> None:
    """It has saved the state that it begins with."""
    around = runs(core, of_task(STAY, resume=3), due={3, 4})
    order, state = around.orders[0]
    marks: Any = Map({(3, RANK): 1, (4, RANK): 1})
    around.orders = [(order, replace(state, checkpoints=replace(state.checkpoints, revoked=marks)))]
    assert not any("save" in line for line in around.says(around.core.recover()))


@check
def functions_that_a_loss_interrupted_are_called_again(core: Core) -> None:
    around = runs(core, of_task(STAY, parts_from=1, new_layout=(1,)))
    said = around.says(around.core.recover())
    assert not any("save" in line for line in said)  # the checkpoint comes after them
    assert (around.status.parts_done, around.repeats) == (1, True)


@check
def what_others_have_done_is_taken_over(core: Core) -> None:
    around = runs(core, of_task(STAY), hooks={4: 3})
    around.status.parts_done = 1
    assert around.says(around.core.recover())[-1] == "take over 1..3 after 4"
    assert around.status.parts_done == 3


@check
def functions_of_another_iteration_are_over(core: Core) -> None:
    around = runs(core, of_task(STAY, resume=5), hooks={4: 3})
    around.status.parts_done = 1
    around.says(around.core.recover())
    assert around.status.parts_done is None


# -------------------------------------------------------------------------------------------------- steps


def live(core: Core, iteration: int = 4, **answers: Any) -> Surroundings:
    around = Surroundings(core, **answers)
    around.status.iteration, around.status.known = iteration, True
    around.core.next = iteration
    return around


def ends_in_recovery(around: Surroundings, flow: Any) -> list[str]:
    """What it does until it recovers and asks for an order, which does not come."""
    around.orders = []
    around.said.clear()
    with pytest.raises(IndexError):  # else it did not recover
        around.says(flow)
    assert around.said[-1] == "leave generation"
    return around.said[:-1]


@check
def a_known_loss_is_recovered_before_a_step(core: Core) -> None:
    around = live(core)
    assert around.says(around.core.ready_to_step()) == ["check", "cancelled?"]
    around = live(core, cancelled=True)
    assert ends_in_recovery(around, around.core.ready_to_step()) == ["check", "cancelled?", "pause"]


@check
def a_replay_goes_on_as_long_as_its_plan_holds(core: Core) -> None:
    orders = [
        (WorkerOrder.REPORT, a_state(3, asked_in=2)),
        (WorkerOrder.EXECUTE, a_state(3, of_task(REPLAY), asked_in=2)),
    ]
    around = Surroundings(core, orders=orders)
    around.says(around.core.recover())
    around.active = True
    assert around.says(around.core.ready_to_step()) == ["check", "replay cancelled? 2"]
    around.answers["replay_cancelled"] = True
    assert ends_in_recovery(around, around.core.ready_to_step())[-1] == "pause"


@check
def a_live_step_begins_and_is_completed(core: Core) -> None:
    around = live(core)
    around.core.generation = 3
    step = around.core.begin()
    assert (step.iteration, step.generation, step.replayed, step.until) == (4, 3, False, 0)
    assert around.core.step is step
    assert around.said == ["begin 4 in 3"]
    assert around.says(around.core.completed()) == ["completed 4", "destroy left", "boundary 4 in 3"]
    assert (around.status.iteration, around.core.next) == (5, None)


@check
def a_step_that_is_verified_counts_once_it_is_judged(core: Core) -> None:
    around = live(core, computation=2, judge=[Judgement(again=True), Judgement()])
    assert around.core.begin().computation == 2
    assert around.says(around.core.completed()) == ["judge 4", "again 4"]
    assert around.status.iteration == 4
    around.core.begin()
    assert around.says(around.core.completed())[:2] == ["judge 4", "completed 4"]
    assert around.status.iteration == 5
    assert around.core.begin(repeatable=False).computation == 0  # then nothing judges it
    assert around.says(around.core.completed())[0] == "completed 5"


@check
def a_loss_while_a_step_is_judged_interrupts_it(core: Core) -> None:
    around = live(core, computation=2, judge=Judgement(cause="Connection closed"))
    around.core.begin()
    said = ends_in_recovery(around, around.core.completed())
    assert said[0] == "judge 4"
    assert "broken Connection closed" in said
    assert not any(line.startswith(("again", "completed")) for line in said)
    assert around.status.iteration == 4


@check
def failpoints_are_where_their_names_say(core: Core) -> None:
    plan = of_task(LOAD)
    states = [a_state(2), a_state(2, plan), a_state(2, plan)]
    orders = zip((WorkerOrder.REPORT, WorkerOrder.EXECUTE, WorkerOrder.RUN), states, strict=True)
    around = Surroundings(core, orders=orders, why_checkpoint="full")
    around.status.iteration, around.status.known = 5, True
    seen: list[str] = []

    def at(point: failpoints.Point, iteration: int, _: int | None) -> None:
        before = around.said[-1] if around.said else "nothing"
        seen.append(f"{point} {iteration} after {before}{'' if around.status.known else ', unknown'}")

    failpoints.listen(at)
    try:
        around.says(around.core.recover())
        around.core.begin()
        around.says(around.core.completed())
        around.active = True
        around.core.begin()
    finally:
        failpoints.listen(None)
    assert seen == [
        "leave 5 after leave generation",
        f"report 5 after order {WorkerOrder.REPORT}",
        f"load 2 after order {WorkerOrder.EXECUTE}",
        "join 2 after open 2 in 2",
        "between 2 after request 3 in 2: full",
        "replay 3 after begin 3 in 2 again",
    ]


def passed_by(core: Core, generation: int, *, own: int, known: int) -> list[str]:
    """The points on the way to a step, and at the end, of a worker that knows some generation."""
    seen: list[str] = []
    state = a_state(generation, of_task(STAY))
    around = Surroundings(core, orders=[(WorkerOrder.REPORT, state), (WorkerOrder.RUN, state)])
    around.core.generation, around.state = own, a_state(known)
    failpoints.listen(lambda point, *_: seen.append(point))
    try:
        around.says(around.core.recover())
        around.says(around.core.finish())
    finally:
        failpoints.listen(None)
    return seen


@check
def a_start_has_a_failpoint_of_its_own(core: Core) -> None:
    """So the first worker at a point of a recovery is in one."""
    assert passed_by(core, 1, own=0, known=0) == ["start", "end"]
    assert passed_by(core, 1, own=0, known=1) == ["start", "end"]
    in_a_recovery = ["leave", "report", "join", "end"]
    assert passed_by(core, 2, own=1, known=1) == in_a_recovery  # the loss is not in the journal yet
    assert passed_by(core, 2, own=0, known=2) == in_a_recovery  # a replacement


@check
def a_worker_says_that_it_is_at_the_end_before_the_others_know(core: Core) -> None:
    around, seen = live(core), list[str]()
    failpoints.listen(lambda point, iteration, _: seen.append(f"{point} {iteration} after {around.said[-1]}"))
    try:
        around.says(around.core.finish())
    finally:
        failpoints.listen(None)
    assert seen == ["end 4 after check"]


@check
def a_step_that_must_not_have_been_is_not_counted(core: Core) -> None:
    around = live(core, completed=RecoveryError("other weights"))
    around.core.begin()
    with pytest.raises(RecoveryError, match="other weights"):
        around.says(around.core.completed())
    assert around.status.iteration == 4


@check
def a_checkpoint_comes_before_all_else_at_a_boundary(core: Core) -> None:
    around = live(core, due={5})
    around.core.begin()
    assert around.says(around.core.completed())[2:] == ["save 5", "boundary 4 in 1"]


@check
def an_early_checkpoint_is_asked_for_with_its_reason(core: Core) -> None:
    around = live(core, why_checkpoint="the disk is full")
    around.core.begin()
    assert around.says(around.core.completed())[-1] == "request 5 in 1: the disk is full"
    around = live(core)
    members = replace(around.state.membership, draining=Map({"m": 0}), slots=Map({"m": 0}))
    around.state = replace(around.state, membership=members)
    around.core.begin()
    assert around.says(around.core.completed())[-1] == "request 5 in 1: m is asked to leave"


@check
def functions_come_between_the_step_and_its_checkpoint(core: Core) -> None:
    around = live(core, due={5}, hooks={5: 2})
    around.core.begin()
    assert around.says(around.core.completed()) == ["completed 4", "destroy left"]
    assert around.status.parts_done == 0
    around.repeats = True
    assert around.says(around.core.settle()) == [
        *("pause", "do 0 after 5 in 1", "pause", "do 1 after 5 in 1"),
        *("save 5", "boundary 4 in 1", "-> True"),
    ]
    assert around.status == WorkerStatus(5, known=True)
    assert not around.repeats
    assert around.says(around.core.settle()) == ["-> True"]


@check
def a_function_that_breaks_off_is_put_back_and_the_loss_recovered(core: Core) -> None:
    around = live(core, hooks={4: 2}, do=[None, "peer gone"])
    around.status.parts_done = 0
    assert ends_in_recovery(around, around.core.settle()) == [
        *("pause", "do 0 after 4 in 1", "pause", "do 1 after 4 in 1"),
        *("check", "abort", "interrupted between", "put back between", "broken peer gone"),
    ]
    assert around.status.parts_done == 1
    around = live(core, hooks={4: 1}, do=["peer gone"])
    around.status.parts_done = 0
    around.orders = [(WorkerOrder.RUN, a_state(2, of_task(STAY)))]
    assert around.says(around.core.settle())[-1] == "-> False"


@check
def an_interrupted_step_is_put_back_before_the_loss_is_confirmed(core: Core) -> None:
    around = live(core, dirty="half")
    around.status.dirty = "of before"
    around.core.begin()
    assert ends_in_recovery(around, around.core.interrupted("peer gone", None)) == [
        *("check", "pause", "abort", "interrupted in", "put back in", "broken peer gone"),
    ]
    assert (around.core.next, around.status.iteration, around.status.dirty) == (None, 4, "half")


@check
def what_was_dirty_in_an_earlier_step_is_not_in_this_one(core: Core) -> None:
    around = live(core)
    around.status.dirty = "of before"
    around.core.begin()
    ends_in_recovery(around, around.core.interrupted("peer gone", None, caught=True))
    assert around.status.dirty is None
    assert "interrupted in, caught" in around.said


@check
def a_replayed_step_cannot_be_interrupted_by_a_peer(core: Core) -> None:
    around = live(core)
    around.active, around.core.generation = True, 3
    around.core.begin()
    ends_in_recovery(around, around.core.interrupted("peer gone", None))
    (event,) = around.events
    assert isinstance(event, ev.ReplayFailed)
    assert (event.generation, "outside of the pipeline" in event.reason) == (3, True)
    assert not any("broken" in line for line in around.said)


@check
def one_that_is_replayed_with_others_can(core: Core) -> None:
    around = live(core)
    around.active = around.joint = True
    around.core.begin()
    assert ends_in_recovery(around, around.core.interrupted("peer gone", None))[-1] == "broken peer gone"


@check
def a_replay_that_turns_out_to_be_impossible_is_reported(core: Core) -> None:
    around = live(core)
    around.active = True
    around.core.begin()
    said = ends_in_recovery(around, around.core.interrupted("x", RecoveryError("the log is torn")))
    assert said[-1] == "append ReplayFailed"
    assert around.events == [ev.ReplayFailed(rank=RANK, generation=1, reason="the log is torn")]


# ------------------------------------------------------------------------------------------ replayed steps


def replaying(core: Core, iteration: int = 2, until: int = 4, **answers: Any) -> Surroundings:
    around = live(core, iteration, **answers)
    around.active, around.until = True, until
    around.core.generation = 2
    around.core.begin()
    return around


@check
def a_replayed_step_counts_and_the_replay_goes_on(core: Core) -> None:
    around = replaying(core)
    assert (around.core.step.replayed, around.core.step.until) == (True, 4)
    assert around.says(around.core.completed()) == ["completed 2", "take over 0..0 after 3"]
    assert (around.status.iteration, around.replayed) == (3, 1)


@check
def its_checkpoint_is_compared_with_the_lost_worker_s(core: Core) -> None:
    around = replaying(core, due={3}, hooks={3: 2})
    assert around.says(around.core.completed())[1:] == ["take over 0..2 after 3", "save 3 in a replay"]
    around = replaying(core, due={3}, save=DivergenceError("other bits"))
    around.state = a_state(5)
    said = ends_in_recovery(around, around.core.completed())
    assert said[-2:] == ["end replay", "append ReplayFailed without a state"]
    assert around.events == [ev.ReplayFailed(rank=RANK, generation=5, reason="other bits")]
    assert (around.status.known, around.replayed) == (False, 0)


@check
def after_another_way_back_nothing_of_the_replay_is_left_to_do(core: Core) -> None:
    around = replaying(core, 3, due={4}, save=[DivergenceError("other bits")])
    around.orders = [(WorkerOrder.RUN, a_state(2, of_task(STAY)))]
    assert around.says(around.core.completed())[-1] == "live 2"
    assert around.replayed == 0
    around = live(core, due={5}, save=[DivergenceError("other bits")])
    around.core.begin()
    around.orders = [(WorkerOrder.RUN, a_state(2, of_task(STAY)))]
    assert around.says(around.core.completed())[-1] == "live 2"  # no boundary


@check
def a_result_that_is_missing_ends_the_replay(core: Core) -> None:
    around = replaying(core, due={3}, take_over=RecoveryError("not noted"))
    assert "save 3 in a replay" not in ends_in_recovery(around, around.core.completed())
    assert (around.status.known, around.replayed) == (False, 0)


@check
def the_last_replayed_step_leads_to_the_others(core: Core) -> None:
    around = replaying(core, 3)
    around.replayed = 1
    assert ends_in_recovery(around, around.core.completed())[2:] == [
        *("end replay", "keep", "append WorkerReady"),
    ]
    assert around.events == [ev.WorkerReady(rank=RANK, generation=2, replayed=2, received=7)]
    assert around.replayed == 0


@check
def functions_after_the_last_replayed_step_are_called_live(core: Core) -> None:
    around = replaying(core, 3, hooks={4: 3}, due={4})
    around.parts_from = 1
    said = ends_in_recovery(around, around.core.completed())
    assert said[1] == "take over 0..1 after 4"
    assert "save 4 in a replay" not in said  # it follows them
    assert around.status.parts_done == 1
    around = replaying(core, 2, hooks={3: 3}, due={3})
    around.parts_from = 1  # which are those at the end of the replay
    assert around.says(around.core.completed())[1:] == ["take over 0..3 after 3", "save 3 in a replay"]


# ------------------------------------------------------------------------------------------ other layouts


@check
def a_step_begins_unless_layers_move_before_it(core: Core) -> None:
    for pending in (None, 5):
        around = live(core)
        around.state = a_state(pending=pending)
        around.core.next = None
        assert around.says(around.core.stops_for_layout()) == ["-> False"]
        assert around.core.next == 4
    around = live(core)
    around.state, around.active = a_state(pending=4), True
    assert around.says(around.core.stops_for_layout()) == ["-> False"]


@check
def all_stop_where_layers_move(core: Core) -> None:
    around = live(core, generation_over=True)
    around.state = a_state(pending=4)
    assert ends_in_recovery(around, around.core.stops_for_layout()) == [
        *("pause", "append LayoutBoundaryReached", "wait for others", "withdraw", "generation over?"),
    ]
    assert around.events == [ev.LayoutBoundaryReached(rank=RANK, generation=1, iteration=4)]
    assert around.core.next is None
    around = live(core, generation_over=True)
    around.state = a_state(pending=4)
    around.orders = [(WorkerOrder.RUN, a_state(2, of_task(STAY)))]
    assert around.says(around.core.stops_for_layout())[-1] == "-> True"


@check
def whoever_waits_where_layers_move_is_in_no_iteration(core: Core) -> None:
    """The journal's thread would break its connections, as if the next one had begun."""
    around = live(core)
    around.state = a_state(pending=4)
    seen: list[int | None] = []
    around.when_waiting = lambda: seen.append(around.core.next)
    around.says(around.core.stops_for_layout())
    assert seen == [None]


@check
def it_goes_on_if_layers_do_not_move_after_all(core: Core) -> None:
    around = live(core)
    around.state = a_state(pending=4)
    assert around.says(around.core.stops_for_layout())[-1] == "-> False"
    assert around.core.next == 4


@check
def layers_that_are_to_move_no_more_as_it_stops_are_waited_for(core: Core) -> None:
    """The journal goes on between two looks at it."""
    around = live(core)
    around.state = a_state(pending=4)
    around.when_paused = a_state()
    assert "append LayoutBoundaryReached" in around.says(around.core.stops_for_layout())


@check
def a_script_that_has_ended_elsewhere_is_a_loss(core: Core) -> None:
    around = live(core)
    state = a_state(pending=4)
    around.state = replace(state, membership=replace(state.membership, ended=Map({0: 4})))
    assert ends_in_recovery(around, around.core.stops_for_layout())[-1] == (
        "broken the script of another worker has left its loop"
    )


@check
def a_step_that_ended_because_others_stopped_is_no_loss(core: Core) -> None:
    around = live(core, generation_over=True)
    around.state = a_state(pending=4)
    around.core.begin()
    around.orders = [(WorkerOrder.RUN, a_state(2, of_task(STAY)))]
    said = around.says(around.core.interrupted("aborted", None))
    assert said[5:11] == [
        *("pause", "append LayoutBoundaryReached", "wait for others", "withdraw", "generation over?"),
        "leave generation",
    ]
    assert not any("broken" in line for line in said)


@check
def unless_layers_do_not_move_after_all(core: Core) -> None:
    for pending, failure, last in (
        (4, None, "broken aborted"),
        (4, RecoveryError("torn"), "append ReplayFailed"),
        (5, None, "broken aborted"),
    ):
        around = live(core)
        around.state = a_state(pending=pending)
        around.core.begin()
        said = ends_in_recovery(around, around.core.interrupted("aborted", failure))
        assert said[-1] == last
        assert ("wait for others" in said) == (pending == 4 and failure is None)


# --------------------------------------------------------------------------------------------- other worlds


@check
def a_worker_of_the_next_world_prepares_takes_its_state_and_reports_it(core: Core) -> None:
    plan = of_task(STAY)
    orders = [
        (WorkerOrder.PREPARE, a_state(3, next=2)),
        (WorkerOrder.TAKE, a_state(3, next=2, pending=4)),
        (WorkerOrder.REPORT, a_state(4, since=4)),
        (WorkerOrder.RUN, a_state(4, plan, since=4)),
    ]
    around = Surroundings(core, orders=orders)
    assert around.says(around.core.recover()) == [
        *("leave generation", f"order {WorkerOrder.PREPARE}", "make ready"),
        "append NextPrepared without a state",
        *(f"order {WorkerOrder.TAKE}", "take in 3, known: False", "append StateTaken"),
        *(f"order {WorkerOrder.REPORT}", "withdraw", "settle 4", "end replay", "flush notes", "report"),
        *("append StatusReported", f"order {WorkerOrder.RUN}"),
        *("prepare 4", "open 4 in 4", "enter 4", "join 1", "live 4"),
    ]
    prepared, taken, report = around.events
    assert prepared == ev.NextPrepared(rank=RANK, world=2)
    assert taken == ev.StateTaken(rank=RANK, world=2)
    assert isinstance(report, ev.StatusReported)
    assert (report.iteration, report.live, report.fresh) == (4, True, False)


@check
def after_a_loss_a_worker_may_offer_its_state_instead_of_a_task(core: Core) -> None:
    orders = [(WorkerOrder.REPORT, a_state(2)), (WorkerOrder.OFFER, a_state(2, next=1, pending=4))]
    around = Surroundings(core, orders=orders)
    around.status.iteration, around.status.known = 4, True
    assert stops_after_its_orders(around)[-3:] == [
        *(f"order {WorkerOrder.OFFER}", "offer 4 to 1", "append StateOffered")
    ]


@check
def a_copy_is_offered_whatever_state_the_worker_is_in(core: Core) -> None:
    """Of the iteration of the copy. The worker was interrupted in a later one, in the middle of an update."""
    orders = [(WorkerOrder.OFFER, a_state(2, next=1, pending=3, copies={RANK: RANK}))]
    around = Surroundings(core, orders=orders)
    around.status.iteration, around.status.known, around.status.dirty = 4, True, "optimizer"
    assert stops_after_its_orders(around)[-2:] == ["offer 3 to 1", "append StateOffered"]


@check
def after_a_loss_too_nothing_is_offered_to_a_change_that_is_no_more(core: Core) -> None:
    for state in (a_state(2), a_state(2, next=1)):
        around = Surroundings(core, orders=[(WorkerOrder.OFFER, state)])
        around.status.iteration, around.status.known = 4, True
        assert not any("offer " in line for line in stops_after_its_orders(around))
        assert not around.events


@check
def another_world_saves_after_its_first_iteration(core: Core) -> None:
    begins = [(WorkerOrder.RUN, a_state(4, of_task(STAY), since=4))]
    around = Surroundings(core, orders=begins)
    around.status.iteration, around.status.known = 4, True
    assert "save 4" not in around.says(around.core.recover())
    for saves in (True, False):
        around.core.begin()
        assert ("save" in " ".join(around.says(around.core.completed()))) == saves
    # Where none is left, where a regular one is due, and where there is one already. It is saved once: a
    # second part would take the place of the one that is committed.
    for due, committed, at_once, first, last in (
        ((), 3, False, True, True),
        ((4,), 3, True, False, False),
        ((), 4, False, False, False),
        ((4,), None, True, False, False),
    ):
        begins = [(WorkerOrder.RUN, a_state(4, of_task(STAY), since=4, committed=committed))]
        around = Surroundings(core, orders=begins, due=due)
        around.status.iteration, around.status.known = 4, True
        assert ("save 4" in around.says(around.core.recover())) == at_once
        assert (around.says(around.core.finish())[2:4] == ["save 4", "finish"]) == last
        around.core.begin()
        assert ("save 5" in around.says(around.core.completed())) == first


@check
def a_state_that_cannot_be_taken_ends_the_change(core: Core) -> None:
    for error in (RecoveryError("gone"), CheckpointError("damaged")):
        around = Surroundings(core, orders=[(WorkerOrder.TAKE, a_state(3, next=2, pending=4))], take=error)
        assert stops_after_its_orders(around)[2:] == [
            *("take in 3, known: False", "append ChangeGivenUp without a state")
        ]
        reason = f"worker {RANK} of the next world cannot take its state: {error}"
        assert around.events == [ev.ChangeGivenUp(world=2, reason=reason)]
        assert around.status == WorkerStatus()


@check
def another_error_is_not_a_state_that_cannot_be_taken(core: Core) -> None:
    around = Surroundings(core, orders=[(WorkerOrder.TAKE, a_state(3, next=2, pending=4))], take=OSError("x"))
    with pytest.raises(OSError, match="x"):
        around.says(around.core.recover())
    assert not around.events


@check
def the_first_world_does_not_save_because_it_began_with_nothing(core: Core) -> None:
    plan = of_task(Task(load=None, begin=0, replay_until=0), RecoveryMode.CONTINUE)
    around = Surroundings(core, orders=[(WorkerOrder.RUN, a_state(1, plan))])
    around.status.known = True
    assert not any("save" in line for line in around.says(around.core.recover()))


@check
def all_stop_for_the_next_world_and_offer_their_state(core: Core) -> None:
    around = live(core, generation_over=True)
    around.state = a_state(pending=4, next=1)
    assert ends_in_recovery(around, around.core.stops_for_layout()) == [
        *("pause", "offer 4 to 1", "append StateOffered", "wait for others", "withdraw", "generation over?"),
    ]
    assert around.events == [ev.StateOffered(rank=RANK, generation=1, iteration=4, address="", digest="")]
    assert around.core.next is None


@check
def who_has_stopped_goes_on_if_the_change_is_given_up(core: Core) -> None:
    around = live(core)
    around.state = a_state(pending=4, next=1)
    assert around.says(around.core.stops_for_layout()) == [
        *("pause", "offer 4 to 1", "append StateOffered", "wait for others", "withdraw", "generation over?"),
        "-> False",
    ]
    assert around.core.next == 4


@check
def what_cannot_be_offered_ends_the_change(core: Core) -> None:
    kinds = (RecoveryError, CheckpointError, UnsupportedError, IncompleteStateError)
    for error in [kind("no room") for kind in kinds]:
        around = live(core, offer=error)
        around.state = a_state(pending=4, next=3)
        said = around.says(around.core.stops_for_layout())
        assert said[1:4] == ["offer 4 to 3", "append ChangeGivenUp", "wait for others"]
        reason = f"worker {RANK} cannot hand its state over: no room"
        assert around.events == [ev.ChangeGivenUp(world=3, reason=reason)]
        assert said[-1] == "-> False", "the present world does not go on"
    around = live(core, offer=OSError("x"))
    around.state = a_state(pending=4, next=3)
    with pytest.raises(OSError, match="x"):
        around.says(around.core.stops_for_layout())


@check
def half_a_state_is_not_offered(core: Core) -> None:
    """Others have stopped before a step that it had begun, and its update had begun, too."""
    around = live(core, dirty="optimizer")
    around.state = a_state(pending=4, next=1)
    around.core.begin()
    said = ends_in_recovery(around, around.core.interrupted("aborted", None))
    assert not any("offer" in line for line in said)
    (given_up,) = around.events
    assert isinstance(given_up, ev.ChangeGivenUp)
    assert "is in the middle of an update: optimizer" in given_up.reason
    assert said[-1] == "broken aborted"


@check
def a_change_that_was_given_up_just_now_is_offered_nothing(core: Core) -> None:
    around = live(core)
    given_up = a_state(pending=4, next=1)
    around.state = replace(given_up, worlds=replace(given_up.worlds, change=None))
    assert around.says(around.core.stops_for_layout()) == [
        *("pause", "wait for others", "withdraw", "generation over?", "-> False"),
    ]
    assert not around.events


@check
def failpoints_of_a_change_are_where_their_names_say(core: Core) -> None:
    seen: list[str] = []

    def at(point: failpoints.Point, iteration: int, _: int | None) -> None:
        seen.append(f"{point} {iteration} after {around.said[-1] if around.said else 'nothing'}")

    failpoints.listen(at)
    try:
        orders = [
            (WorkerOrder.PREPARE, a_state(3, next=2)),
            (WorkerOrder.TAKE, a_state(3, next=2, pending=4)),
        ]
        around = Surroundings(core, orders=orders)
        stops_after_its_orders(around)
        around = live(core)
        around.state = a_state(pending=4, next=1)
        around.says(around.core.stops_for_layout())
        around.status.dirty = "optimizer"
        around.says(around.core.stops_for_layout())
    finally:
        failpoints.listen(None)
    assert seen == [
        "leave 0 after leave generation",
        f"prepared 0 after order {WorkerOrder.PREPARE}",
        f"take 4 after order {WorkerOrder.TAKE}",
        *("offer 4 after pause", "offer 4 after pause"),
    ]


# -------------------------------------------------------------------------------------------------- the end


@check
def it_ends_when_all_have_done_the_last_iteration(core: Core) -> None:
    around = live(core)
    around.state = a_state(6)
    assert around.says(around.core.finish()) == [
        *("pause", "generation over?", "finish", "check", "append WorkerFinished", "wait for finish"),
        *("generation over?", "close", "-> True"),
    ]
    assert around.events == [ev.WorkerFinished(rank=RANK, generation=6)]


@check
def it_says_whether_a_checkpoint_of_all_follows_the_last_iteration(core: Core) -> None:
    """One that was asked for does not count, since others may not have heard of it."""
    last = live(core).status.iteration
    for regular, due, committed, begun, saves in (
        ((last,), (last,), 0, None, last),
        ((), (last,), 0, None, None),
        ((), (), None, last, last),  # another world has begun there, and has no checkpoint yet
    ):
        around = live(core, regular=regular, due=due)
        around.state = a_state(6, since=begun, committed=committed)
        around.says(around.core.finish())
        (finished,) = [event for event in around.events if isinstance(event, ev.WorkerFinished)]
        assert finished.saves == saves


@check
def a_loss_at_the_end_is_recovered(core: Core) -> None:
    around = live(core, generation_over=[True])
    assert ends_in_recovery(around, around.core.finish()) == ["pause", "generation over?"]
    around = live(core, generation_over=[True])
    around.state = a_state(since=around.status.iteration, committed=None)
    assert ends_in_recovery(around, around.core.finish()) == ["pause", "generation over?"]
    around = live(core, generation_over=[False, True])
    assert ends_in_recovery(around, around.core.finish())[-1] == "generation over?"
    for over in ([True], [False, True]):
        around = live(core, generation_over=over)
        around.orders = [(WorkerOrder.RUN, a_state(2, of_task(STAY)))]
        assert around.says(around.core.finish())[-1] == "-> False"
        assert "close" not in around.said


@check
def a_script_that_leaves_its_loop_leaves_nothing_on_its_way(core: Core) -> None:
    """The parts first: a worker waits last for what the others have to do, too."""
    around = live(core)
    assert around.says(around.core.leave()) == ["finish", "leave 4"]


@check
def a_job_that_has_ended_ends_the_worker(core: Core) -> None:
    around = live(core)

    def ended() -> Any:
        raise JobEndedError("gave up")

    around.next_order = ended  # type: ignore[method-assign]
    with pytest.raises(JobEndedError):
        around.says(around.core.recover())
    assert not around.events
