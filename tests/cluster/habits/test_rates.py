"""What a script changes of its optimizers at the top of a step, or after it, is put back with the step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import assert_put_back, refusal

SCRIPT = Path(__file__).parent / "scripts" / "rates.py"
FAULTS = "kill machine=1 iteration=4 point=reduce committed=3; kill machine=0 iteration=5 point=reduced"
HABITS = [
    "linear",
    "lambda",
    "exponential",
    "tensor rate",
    "plain optimizer",
    "average",
    "at the top",
    "betas at the top",
    "one index",
    "decay",
]
OF_STATE = [
    "momentum correction",
    "momentum correction in each step",
    "averages pruned after the update",
    "averages renewed between",
]


@pytest.mark.parametrize("habit", HABITS)
def test_replicas(habit: str, tmp_path: Path) -> None:
    """The loss strikes in the very step that a script treats unlike the others."""
    assert_put_back(
        tmp_path,
        SCRIPT,
        habit,
        inject=FAULTS,
    )


@pytest.mark.parametrize("habit", OF_STATE)
def test_state_that_is_changed_by_hand(habit: str, tmp_path: Path) -> None:
    """In the backward pass of the very step in which the momentum is corrected, and of the next one."""
    run = assert_put_back(tmp_path, SCRIPT, habit, inject=FAULTS)
    said = "an optimizer's state of model.0.weight" in run.output and "for the first time" in run.output
    assert said == (habit == "momentum correction"), "only there the first change comes with the loss"


@pytest.mark.parametrize(
    "habit", ["linear", "tensor rate", "average", "one index", "betas at the top", "clamp"]
)
def test_a_pipeline(habit: str, tmp_path: Path) -> None:
    """The stage that lives repeats the step, and the other one is replayed from a checkpoint."""
    fault = "kill machine=0 iteration=4 point=backward microbatch=1 committed=3"
    assert_put_back(tmp_path, SCRIPT, habit, "pipeline", inject=fault)


def test_a_function_that_a_step_gives_to_a_scheduler(tmp_path: Path) -> None:
    """Where the loss strikes in the very step that does so, the repeated step begins without it."""
    fault = "kill machine=1 iteration=4 point=reduce committed=3"
    said = "A step has given scheduler (LambdaLR) another number of functions, or of schedulers, than"
    assert said in refusal(tmp_path, SCRIPT, "another function", inject=fault)
