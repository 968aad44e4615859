"""Where gradients are zeroed is the script's choice. One that adds to those of the step before is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import assert_put_back, refusal

SCRIPT = Path(__file__).parent / "scripts" / "gradients.py"


@pytest.mark.parametrize(
    "habit",
    [
        "first line",
        "first line, set to zero",
        "first line, plain optimizer",
        "after the forward",
        "by hand",
        "last line, set to zero",
        "first line, set to zero, heads in turn",
    ],
)
def test_zeroed_in_each_step(habit: str, tmp_path: Path) -> None:
    faults = "kill machine=1 iteration=1 point=reduce; kill machine=0 iteration=5 point=reduced committed=3"
    assert_put_back(tmp_path, SCRIPT, habit, inject=faults)


@pytest.mark.parametrize(
    "habit", ["carried from iteration 5 on", "every second step", "one parameter is left out"]
)
def test_carried_over(habit: str, tmp_path: Path) -> None:
    line = refusal(tmp_path, SCRIPT, habit)
    assert "is carried over from the step before" in line
    assert "optimizer.zero_grad()" in line


def test_an_update_of_the_step_before(tmp_path: Path) -> None:
    """Nothing is added to its gradients, and no checkpoint has them."""
    line = refusal(tmp_path, SCRIPT, "delayed")
    assert "is carried over from the step before: the optimizer steps with it" in line
    assert "No checkpoint has gradients" in line
