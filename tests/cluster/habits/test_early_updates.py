"""Wait-free updates are made within the backward pass: they are whole steps, or the script is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import assert_undisturbed
from tests.support.habits import refusal, run_habit
from tests.support.integrations import assert_same_files

SCRIPT = Path(__file__).parent / "scripts" / "updates_early.py"
REFUSED = {
    "clipping": "gradients have changed since",
    "a rate": "'lr' of their group has changed since",
    "a scaler": "gradients have changed since",
    "a scaler that skips": "no optimizer.step() followed",
}


@pytest.mark.parametrize("habit", REFUSED)
def test_changes_that_come_too_late(habit: str, tmp_path: Path) -> None:
    line = refusal(tmp_path, SCRIPT, habit)
    assert REFUSED[habit] in line
    assert "eave wait_free out" in line


@pytest.mark.parametrize("habit", ["nothing", "wrapped late"])
def test_an_update_that_nothing_changes(habit: str, tmp_path: Path) -> None:
    """Bit for bit as with a plain optimizer, also after a loss between two updates."""
    plain = assert_undisturbed(run_habit(tmp_path / "plain", SCRIPT, "a plain optimizer"))
    fault = "kill machine=1 iteration=4 point=update bucket=0"
    run = run_habit(tmp_path / "disturbed", SCRIPT, habit, inject=fault)
    assert run.code == 0, run.output[-6000:]
    assert run.recoveries
    assert_same_files(run, plain)
