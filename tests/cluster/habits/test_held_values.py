"""Values that a script holds by itself are put back and handed over, or a line names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import assert_put_back, run_habit

pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).parent / "scripts" / "holds_values.py"
FAULTS = "kill machine=1 iteration=4 point=reduce committed=3; kill machine=0 iteration=6 point=reduce"


@pytest.mark.parametrize(
    "habit",
    [
        "one tensor in two places",
        "an average of parameters",
        "keyed by parameters",
        "a long list",
        "a queue in a local variable",
        "a ring in a local variable",
    ],
)
def test_replicas(habit: str, tmp_path: Path) -> None:
    assert_put_back(tmp_path, SCRIPT, habit, inject=FAULTS)


@pytest.mark.parametrize(
    ("habit", "named"), [("a large average", "table.average"), ("a large attribute", "net.table")]
)
def test_what_is_too_large(habit: str, named: str, tmp_path: Path) -> None:
    """It cannot be handed over. A line says so."""
    run = run_habit(tmp_path, SCRIPT, habit, inject=FAULTS)
    assert run.code == 0, run.output[-6000:]
    assert f"{named} (a" in run.output
    assert "cannot travel with the state" in run.output
