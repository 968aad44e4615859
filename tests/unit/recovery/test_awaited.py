"""What a relay holds back of workers that are about to form a group."""

from __future__ import annotations

from dataclasses import replace

import pytest
from immutables import Map

from swift_ft.recovery import events as ev
from swift_ft.recovery.awaited import awaited, told
from swift_ft.recovery.job_state import JobShape, Phase, RecoveryRound, State
from swift_ft.recovery.membership import Membership
from swift_ft.recovery.plan import Plan, RecoveryMode


def job(phase: Phase, *, layers: tuple[int, ...] | None = None) -> State:
    """Three machines of two workers each, of which worker 1 is about to form a group."""
    plan = Plan(RecoveryMode.CONTINUE, 5)
    return State(
        phase=phase,
        generation=2,
        shape=JobShape(machines=3, workers_per_machine=2),
        membership=Membership(members=Map({slot: f"m-{slot}.0" for slot in range(3)})),
        round=RecoveryRound(plan=replace(plan, new_layout=layers), awaiting=Map({1: None})),
    )


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (job(Phase.LIVE), set()),  # all workers form the group of the generation at once
        (job(Phase.RECOVERING, layers=(1, 2, 3)), {0, 2, 3}),  # all take part in the group of a move
        (job(Phase.RECOVERING), set()),  # who replays together does not wait for others
        (job(Phase.AGREEING), set()),
    ],
)
def test_a_group_of_all_workers_is_awaited_as_a_whole(state: State, expected: set[int]) -> None:
    found = told(ev.GroupAwaited(rank=0, generation=2))
    assert found is not None
    what, rank = found
    assert rank == 0
    assert awaited(state, what, range(2)) == expected


def test_a_group_of_a_generation_that_is_over_is_not_awaited() -> None:
    found = told(ev.GroupAwaited(rank=0, generation=1))
    assert found is not None
    what, _ = found
    assert awaited(job(Phase.RECOVERING, layers=(1, 2, 3)), what, range(2)) == set()


@pytest.mark.parametrize("generation", [1, 2, 3])
def test_reports_are_awaited_together_whichever_generation_asked(generation: int) -> None:
    """Ranks 0 to 3 are on the machines of a relay; a report of a generation to come is on its way, too."""
    report = ev.StatusReported(rank=2, generation=1, iteration=4)
    state = job(Phase.AGREEING)
    state = replace(state, round=RecoveryRound(asked_in=1, statuses=Map({2: report})))
    found = told(replace(report, generation=generation))
    assert found is not None
    what, _ = found
    assert awaited(state, what, range(2)) == {0, 1, 3}
    assert awaited(job(Phase.LIVE), what, range(2)) == {0, 1, 2, 3}
