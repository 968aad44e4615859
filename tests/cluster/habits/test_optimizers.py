"""An optimizer within an optimizer: its state is handed over, or found missing before training begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import assert_put_back, refusal

SCRIPT = Path(__file__).parent / "scripts" / "optimizers.py"


@pytest.mark.parametrize("habit", ["both are passed", "shares its state", "saves both states"])
def test_handed_over(habit: str, tmp_path: Path) -> None:
    faults = "kill machine=1 iteration=4 point=reduce committed=3; kill machine=0 iteration=5 point=reduced"
    assert_put_back(tmp_path, SCRIPT, habit, inject=faults)


def test_saved_nowhere(tmp_path: Path) -> None:
    line = refusal(tmp_path, SCRIPT, "one is passed")
    assert "The AdamW in base of the Slow keeps a state of its own" in line
    assert 'Session({..., "base": optimizer.base}, ...)' in line
