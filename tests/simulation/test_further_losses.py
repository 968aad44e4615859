"""Reports that count on when a further machine is lost, through seeded orders of failures.

All simulations check that they are true when a plan is made of them, and that no worker is asked twice
(`swift_ft/testing/simulation/invariants.py`). Here it is shown that this happens, and that these checks find
what they should.
"""

from __future__ import annotations

import pytest

from swift_ft.recovery.handlers import generations, membership, newcomers, recovery
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import WorkerOrder, worker_order
from swift_ft.recovery.plan import Plan
from swift_ft.recovery.values import replace
from swift_ft.testing.simulation import JobKind, Violation, process, simulate
from tests.support.simulation import SHAPES, run_seeds


@pytest.mark.parametrize("heads", [False, True], ids=["alone", "with heads"])
@pytest.mark.parametrize("kind", SHAPES)
def test_reports_count_on(kind: JobKind, heads: bool) -> None:
    seen = run_seeds(kind, *SHAPES[kind], 200, 30_000, heads=heads)
    assert seen["plan with reports of an earlier generation"] > 15
    assert seen["reports of an earlier generation"] > 1.4 * seen["plan with reports of an earlier generation"]


@pytest.mark.thorough
@pytest.mark.parametrize("heads", [False, True], ids=["alone", "with heads"])
@pytest.mark.parametrize("kind", SHAPES)
def test_many_seeds(kind: JobKind, heads: bool) -> None:
    assert run_seeds(kind, *SHAPES[kind], 2_000, 40_000, heads=heads)["finished"]


# ------------------------------------------------------------------------------- defects that are found


def run_two_kinds(seeds: int) -> None:
    for seed in range(seeds):
        for kind in (JobKind.PIPELINE, JobKind.ADJACENT):
            simulate(kind, seed, *SHAPES[kind])


def find(message: str) -> None:
    with pytest.raises(Violation, match=message):
        run_two_kinds(150)


def test_reports_that_outlive_a_plan_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = recovery._carry_out

    def undecided(state: State, plan: Plan) -> State:
        after = right(state, plan)
        return replace(after, round=replace(after.round, decided=False))

    monkeypatch.setattr(recovery, "_carry_out", undecided)
    find("has reported StatusReported")


def test_reports_of_lost_machines_that_count_on_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = generations.vacate

    def with_its_reports(state: State, machine: str) -> State:
        after = right(state, machine)
        return replace(after, round=replace(after.round, statuses=state.round.statuses))

    for handlers in (membership, newcomers):
        monkeypatch.setattr(handlers, "vacate", with_its_reports)
    find("has reported StatusReported|goes live in a generation")


def test_a_worker_that_reports_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_each_generation(
        state: State, *, machine: str, rank: int, started_in: int, world: int = 0
    ) -> WorkerOrder:
        order = worker_order(state, machine=machine, rank=rank, started_in=started_in, world=world)
        reported = state.round.statuses.get(rank)
        if state.phase != Phase.AGREEING or reported is None or reported.generation == state.generation:
            return order
        return WorkerOrder.REPORT if order == WorkerOrder.HOLD else order

    monkeypatch.setattr(process, "worker_order", in_each_generation)
    find("comes a second time")
