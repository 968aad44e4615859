"""Values that a script holds by itself are put back and handed over, or a line names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import assert_put_back

pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).parent / "scripts" / "holds_values.py"
FAULTS = "kill machine=1 iteration=4 point=reduce committed=3; kill machine=0 iteration=6 point=reduce"


@pytest.mark.parametrize("habit", ["one tensor in two places"])
def test_replicas(habit: str, tmp_path: Path) -> None:
    assert_put_back(tmp_path, SCRIPT, habit, inject=FAULTS)
