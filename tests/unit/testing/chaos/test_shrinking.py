"""The smallest plan that still fails is found, in a limited number of runs."""

from __future__ import annotations

from swift_ft.faults import parse_faults
from swift_ft.testing.chaos.shrinking import Plan, shrunk

PLAN = parse_faults(
    "break worker=1 iteration=3; kill machine=1 iteration=6 point=forward microbatch=2; "
    "stop worker=0 iteration=7"
)


def test_only_the_fault_that_matters_is_left() -> None:
    runs: list[Plan] = []

    def fails(plan: Plan) -> bool:
        runs.append(plan)
        return any(fault.point == "forward" and (fault.iteration or 0) >= 5 for fault in plan)

    smallest, count = shrunk(PLAN, fails, 100)
    assert "; ".join(map(str, smallest)) == "kill machine=0 iteration=5 point=forward"
    assert count == len(runs) == len(set(runs))


def test_a_plan_of_which_all_is_needed_stays() -> None:
    assert shrunk(PLAN, lambda _: False, 100)[0] == PLAN


def test_runs_are_limited() -> None:
    assert shrunk(PLAN, lambda _: True, 2)[1] == 2
