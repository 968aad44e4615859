"""Random faults while a running job changes to other worlds: no run is wrong, hangs, or leaves something."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_ft.faults import Point, parse_faults
from tests.support.change_chaos import References, random_plan, references_in, run_plan

DEFAULT = (3, 4)
"""Seeds of two plans: machines of both worlds are killed as state is taken over, and before that."""
SEEDS = 40


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    return references_in(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    "seed",
    [
        *DEFAULT,
        *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(SEEDS) if seed not in DEFAULT),
    ],
)
def test_a_plan_is_survived(seed: int, tmp_path: Path, reference: References) -> None:
    result = run_plan(tmp_path, plan := random_plan(seed), reference)
    assert result.is_good, f"{plan}: {result.reason}"
    if seed in DEFAULT:  # the fault struck, the change was given up, and came when it was asked for again
        assert (result.outcome, result.worlds) == ("identical", 1), f"{plan}: {result}"
        assert result.given_up >= 1
        assert result.ways


def test_a_seed_is_a_plan() -> None:
    """All scripts, and all points of a change, are among those that are run."""
    plans = [random_plan(seed) for seed in range(300)]
    assert plans == [random_plan(seed) for seed in range(300)]
    assert {plan.example for plan in plans} == {"train_ddp", "train_elastic", "train_swift"}
    points = {fault.point for plan in plans for fault in parse_faults(plan.faults)}
    assert {Point.PREPARED, Point.OFFER, Point.TAKE} < points
    assert {len(plan.changes) for plan in plans} == {1, 2}
