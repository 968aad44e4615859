"""A replacement has the flags and the structure that the script has changed since its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import assert_put_back

SCRIPT = Path(__file__).parent / "scripts" / "flags.py"
HABITS = [
    "unfreezing",
    "evaluation mode of a layer",
    "a dropout's p",
    "another group",
    "as many other parameters",
    "an attribute",
    "a group that the script holds",
    "an enum of another file",
    "a named tuple",
]


@pytest.mark.parametrize("habit", HABITS)
def test_replicas(habit: str, tmp_path: Path) -> None:
    """In the iteration that changes them, and two later."""
    faults = "kill machine=0 iteration=2 point=reduce; kill machine=1 iteration=4 point=reduce committed=3"
    assert_put_back(tmp_path, SCRIPT, habit, inject=faults)


@pytest.mark.parametrize("habit", HABITS)
def test_a_pipeline(habit: str, tmp_path: Path) -> None:
    """The lost stage loads a checkpoint from after the change, and replays."""
    faults = "kill machine=1 iteration=4 point=backward microbatch=1 committed=3"
    run = assert_put_back(tmp_path, SCRIPT, habit, "pipeline", inject=faults)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay"]
