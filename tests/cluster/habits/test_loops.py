"""A loop that a session cannot protect is found in its first steps, and a store for each worker before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import refusal

SCRIPT = Path(__file__).parent / "scripts" / "loops.py"
LINES = {
    "epochs": "the script calls it a second time. For epochs write",
    "counted": "enumerate() counts a step again when it is repeated",
    "no steps": "(train_step) trains outside of session.steps()",
    "a store for each rank": "does not have what worker 0 has written into its store",
}


@pytest.mark.parametrize("habit", LINES)
def test_refused(habit: str, tmp_path: Path) -> None:
    assert LINES[habit] in refusal(tmp_path, SCRIPT, habit)
