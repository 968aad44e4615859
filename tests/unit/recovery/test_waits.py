"""What the job waits for follows from the journal alone, and names who is missing."""

from __future__ import annotations

import pytest

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step
from swift_ft.recovery.waits import Limit, Wait, limit_of_answers, waiting_for
from swift_ft.units import named


def after(*events: ev.Event, state: State | None = None) -> State:
    state = state or State()
    for event in events:
        state = step(state, event)
    return state


def joined(machines: int, *, workers: int = 1, names: str = "abcd") -> list[ev.Event]:
    opened = ev.JobOpened(machines=machines, workers_per_machine=workers)
    return [opened, *(ev.MachineJoined(machine=name) for name in names[:machines])]


def reported(rank: int, generation: int, iteration: int | None = None) -> ev.StatusReported:
    live = iteration is not None
    return ev.StatusReported(
        rank=rank, generation=generation, iteration=iteration, live=live, stages=(rank,), pipeline_known=True
    )


@pytest.fixture
def live() -> State:
    """Three machines train; the checkpoint of iteration 40 is committed."""
    return after(
        *joined(3),
        *(reported(rank, 1) for rank in range(3)),
        *(ev.WorkerReady(rank=rank, generation=1) for rank in range(3)),
        ev.CheckpointCommitted(iteration=40, epoch=1),
    )


def said(state: State) -> tuple[str, Limit | None]:
    wait = waiting_for(state)
    assert isinstance(wait, Wait)
    return wait.what, wait.limit


def test_nothing_is_waited_for_while_all_train(live: State) -> None:
    assert waiting_for(State()) is None
    assert waiting_for(live) is None


def test_machines_that_have_not_come() -> None:
    state = after(ev.JobOpened(machines=4), ev.MachineJoined(machine="a"))
    assert said(state) == ("3 of 4 machines to join", Limit.JOIN)


def test_a_replacement(live: State) -> None:
    state = after(ev.MachineLost(machine="b", reason="gone"), state=live)
    assert said(state) == ("a replacement for machine 1", Limit.JOIN)
    one = waiting_for(state)
    state = after(ev.MachineLost(machine="c", reason="gone"), ev.MachineJoined(machine="d"), state=state)
    assert said(state) == ("a replacement for machines 1 and 2, 1 of 2 are here", Limit.JOIN)
    other = waiting_for(state)
    assert one is not None
    assert other is not None
    assert one.step != other.step


def test_workers_that_have_not_reported() -> None:
    state = after(*joined(2, workers=2))
    assert waiting_for(state) is None  # the script may have no session
    state = after(reported(0, 1), state=state)
    assert said(state) == ("workers 1, 2 and 3 on machines 0 and 1 to report", Limit.REPORT)
    state = after(reported(1, 1), reported(3, 1), state=state)
    assert said(state) == ("worker 2 on machine 1 to report", Limit.REPORT)


def test_what_ends_the_wait_for_late_workers(live: State) -> None:
    started = after(*joined(2))
    assert limit_of_answers(started) is None, "the script may have no session"
    assert limit_of_answers(after(reported(0, 1), state=started)) == Limit.REPORT
    assert limit_of_answers(live) is None
    lost = after(ev.MachineLost(machine="b", reason="gone"), state=live)
    assert limit_of_answers(lost) is None, "that is the wait for a machine"
    back = after(ev.MachineJoined(machine="d"), reported(0, 2, 47), reported(2, 2, 47), state=lost)
    assert limit_of_answers(back) == Limit.REPORT
    assert limit_of_answers(after(reported(1, 2), state=back)) == Limit.REPLAY


def test_a_replay(live: State) -> None:
    lost = after(
        ev.MachineLost(machine="b", reason="gone"),
        ev.MachineJoined(machine="d"),
        reported(0, 2, 47),
        state=live,
    )
    assert said(lost) == ("workers 1 and 2 to report", Limit.REPORT)
    state = after(reported(1, 2), reported(2, 2, 47), state=lost)
    assert said(state) == ("worker 1 to replay iterations 40 to 46", Limit.REPLAY)
    wait = waiting_for(state)
    assert wait is not None
    assert wait.until_progress
    assert waiting_for(after(ev.WorkerReady(rank=1, generation=2, replayed=7), state=state)) is None


def test_the_end(live: State) -> None:
    state = after(ev.WorkerFinished(rank=0, generation=1), state=live)
    assert said(state) == ("workers 1 and 2 to complete the last iteration", None)
    part = ev.PartPersisted(rank=0, iteration=50, epoch=1, generation=1, path="part")
    finished = [ev.WorkerFinished(rank=rank, generation=1) for rank in (1, 2)]
    state = after(part, *finished, state=state)
    assert said(state) == ("the store: 1 of 3 parts of checkpoint 50 are there", Limit.CHECKPOINT)
    parts = [ev.PartPersisted(rank=rank, iteration=50, epoch=1, generation=1, path="part") for rank in (1, 2)]
    state = after(*parts, state=state)
    assert said(state) == ("the store to take the marker of checkpoint 50", Limit.CHECKPOINT)
    state = after(
        ev.CheckpointCommitted(iteration=50, epoch=1), ev.ScriptExited(machine="b", started_in=1), state=state
    )
    assert said(state) == ("the script to end on machines 0 and 2", None)


def test_names_of_many_are_cut_short() -> None:
    assert named("worker", [1]) == "worker 1"
    assert named("worker", [2, 1]) == "workers 1 and 2"
    assert named("worker", range(20)) == "workers 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
