"""Parameters that change outside of an optimizer's step are put back with the step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import assert_put_back

SCRIPT = Path(__file__).parent / "scripts" / "parameters.py"
BETWEEN_THE_PASSES = (
    "kill machine=1 iteration=4 point=reduce committed=3; kill machine=0 iteration=5 point=reduced"
)
HABITS = [
    "momentum encoder, in place",
    "momentum encoder, by data",
    "momentum encoder, by lerp on data",
    "SAM",
    "SAM, on data",
    "SAM, no_sync",
    "weight noise",
    "clamp, in place",
    "clamp, on data",
    "clamp, on data, plain optimizer",
    "clip of one weight, by data",
]


@pytest.mark.parametrize("habit", HABITS)
def test_replicas(habit: str, tmp_path: Path) -> None:
    assert_put_back(tmp_path, SCRIPT, habit, inject=BETWEEN_THE_PASSES)


@pytest.mark.parametrize("habit", ["clamp, in place", "clamp, on data", "clip of one weight, by data"])
def test_replicas_by_fsdp(habit: str, tmp_path: Path) -> None:
    first = "kill machine=1 iteration=4 point=optimizer committed=3"
    faults = f"{first}; kill machine=0 iteration=5 point=between"
    assert_put_back(tmp_path, SCRIPT, habit, "shards", inject=faults)


@pytest.mark.parametrize(
    "habit", ["clamp, in iteration 4 only", "slow weights, each fifth step", "shrink, each fifth step"]
)
def test_a_write_between_the_update_and_more_communication(habit: str, tmp_path: Path) -> None:
    """No step before did so: an undo would begin from other values, or lead to others, than the update."""
    loss = "kill machine=1 iteration=4 point=optimizer committed=3"
    run = assert_put_back(tmp_path, SCRIPT, habit, inject=loss)
    assert "outside of an optimizer's step for the first time" in run.output


def test_a_habit_that_begins_late(tmp_path: Path) -> None:
    """In the very iteration in which it begins, and in the next one."""
    faults = "kill machine=1 iteration=2 point=reduce; kill machine=1 iteration=4 point=reduce committed=3"
    assert_put_back(tmp_path, SCRIPT, "clamp, from iteration 2 on", inject=faults)
