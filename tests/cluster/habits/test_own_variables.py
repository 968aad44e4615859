"""What each replica has for itself is not given to another one, and where that would matter it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import assert_put_back, refusal

SCRIPT = Path(__file__).parent / "scripts" / "own_variables.py"


LOSS = "kill machine=1 iteration=6 point=reduce committed=5"


@pytest.mark.parametrize("habit", ["a name and a loss", "seeded in each step", "made anew in each step"])
def test_what_is_its_own_stays_its_own(habit: str, tmp_path: Path) -> None:
    """A replacement writes into the file of its own rank, also in its first step."""
    assert_put_back(tmp_path, SCRIPT, habit, inject=LOSS)


def test_what_a_replica_of_a_shard_has_stays_its_own(tmp_path: Path) -> None:
    loss = "kill machine=1 iteration=6 point=optimizer committed=5"
    assert_put_back(tmp_path, SCRIPT, "a name and a loss", "sharded", inject=loss, machines=4)


@pytest.mark.parametrize("habit", ["torch.Generator", "NumPy's generator"])
def test_a_generator_of_its_own(habit: str, tmp_path: Path) -> None:
    line = refusal(tmp_path, SCRIPT, habit)
    assert "goes on from step to step, and its state is not the same on workers 0 and 1" in line
    assert ".noise goes on" in line or ".choices goes on" in line


@pytest.mark.parametrize("iteration", [0, 1, 2])
def test_a_loss_before_anything_was_compared(iteration: int, tmp_path: Path) -> None:
    """The replacement keeps the generator of its own script, so that it is still found."""
    loss = f"kill machine=1 iteration={iteration} point=reduce"
    line = refusal(tmp_path, SCRIPT, "torch.Generator", inject=loss)
    assert "goes on from step to step, and its state is not the same on workers 0 and 1" in line


def test_a_generator_of_a_replica_of_a_shard(tmp_path: Path) -> None:
    line = refusal(tmp_path, SCRIPT, "torch.Generator", "sharded", machines=4)
    assert "The generator model.noise goes on from step to step, and its state is not the same on" in line
