"""The smallest plan that still fails is found, in a limited number of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_ft.faults import parse_faults
from swift_ft.testing.chaos.shrinking import Plan, fails_alike, shrunk
from swift_ft.testing.chaos.trial import Outcome, Trial

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


WEIGHT, BIAS = "worker 0.models.model.weight", "worker 0.models.model.bias"
LOSS, TOTAL = (f"worker 0.plain.bytes.carried.(loop).{name}" for name in ("loss", "total"))


@pytest.mark.parametrize(
    ("ours", "theirs", "alike"),
    [
        ([WEIGHT, BIAS], [WEIGHT.replace("0", "3")], True),
        ([WEIGHT], [BIAS], False),
        ([LOSS], [f"{TOTAL}.sum"], True),
        ([LOSS, WEIGHT], [TOTAL, BIAS], False),
        ([WEIGHT], ["file out.txt"], False),
        (["file out.txt"], ["file out.txt"], True),
        ([], [], True),
        ([], [WEIGHT], False),
    ],
)
def test_two_runs_are_wrong_alike_where_the_same_differs(
    ours: list[str], theirs: list[str], alike: bool
) -> None:
    """Or any variables of the script, and nothing else. Without a state the reasons tell."""
    one, other = (
        Trial("", Outcome.WRONG, 0, f"{number} differ" if names else "it left no checkpoint", {}, Path())
        for number, names in enumerate((ours, theirs))
    )
    assert fails_alike(one, other, lambda trial: ours if trial is one else theirs) == alike
    crashed = Trial("", Outcome.CRASHED, 1, one.reason, {}, Path())
    assert not fails_alike(one, crashed, lambda _: ours)
