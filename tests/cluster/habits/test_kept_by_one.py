"""A replacement has what its rank alone keeps, as the last checkpoint found it, and a line says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import assert_put_back

SCRIPT = Path(__file__).parent / "scripts" / "kept_by_one.py"


@pytest.mark.parametrize(("habit", "machine"), [("by worker 0", 0), ("by worker 1", 1)])
def test_what_one_replica_keeps(habit: str, machine: int, tmp_path: Path) -> None:
    """It begins to after the third step. Worker 1 saves no part of the checkpoint itself."""
    loss = f"kill machine={machine} iteration=6 point=reduce committed=6"
    run = assert_put_back(tmp_path, SCRIPT, habit, inject=loss)
    assert "as it was in iteration 6" in run.output


def test_all_return_to_a_checkpoint_that_one_has_saved(tmp_path: Path) -> None:
    """Worker 1 keeps the best model, and worker 0 has saved the only part: of its own variables."""
    lost = "; ".join(f"kill worker={rank} iteration=7 point=reduce committed=6" for rank in range(2))
    run = assert_put_back(tmp_path, SCRIPT, "by worker 1", inject=lost)
    assert [recovery["mode"] for recovery in run.recoveries] == ["start"], run.output[-3000:]
