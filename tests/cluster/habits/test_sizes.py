"""Buffers that change their size as a model trains come back with the size that they had.

So do those that are None at first.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import assert_undisturbed
from tests.support.habits import assert_put_back, run_habit
from tests.support.integrations import assert_same_files

SCRIPT = Path(__file__).parent / "scripts" / "sizes.py"
OF_ONE = "kill machine=1 iteration=4 point=reduce committed=3; kill machine=0 iteration=5 point=optimizer"
OF_FIRST = "kill machine=1 iteration=0 point=reduce; kill machine=0 iteration=1 point=reduce"
OF_STAGE = "kill machine=1 iteration=5 point=backward microbatch=1 committed=3"


@pytest.mark.parametrize(
    ("habit", "faults", "more"),
    [
        ("quantized", OF_ONE, []),
        ("grows", OF_FIRST, []),
        ("grows in place", OF_FIRST, []),
        ("grows from one", OF_ONE, []),
        ("made", OF_FIRST, []),
        ("quantized", OF_STAGE, ["pipeline"]),
        ("grows from one", OF_STAGE, ["pipeline"]),
        ("made", OF_STAGE, ["pipeline"]),
    ],
    ids=[
        "observers",
        "in the first iteration",
        "in place",
        "from one row",
        "made by a forward",
        "a stage's observers",
        "a stage's bank",
        "made by a stage",
    ],
)
def test_handed_over(habit: str, faults: str, more: list[str], tmp_path: Path) -> None:
    run = assert_put_back(tmp_path, SCRIPT, habit, "8", *more, inject=faults)
    assert {one["mode"] for one in run.recoveries} <= {"replica", "replay", "restart"}, run.output[-6000:]


@pytest.mark.parametrize("habit", ["quantized", "grows", "grows from one", "made"])
def test_resumed(habit: str, tmp_path: Path) -> None:
    """What begins with elements is taken for another model's, as torch does."""
    folder = tmp_path / "ended"
    assert run_habit(folder, SCRIPT, habit, "6").code == 0
    resumed = run_habit(folder, SCRIPT, habit, "8", flags=["--resume"])
    if habit == "grows from one":
        assert resumed.code != 0
        assert "A buffer that grows as it trains is taken if it begins without elements" in resumed.output
        return
    assert resumed.code == 0, resumed.output[-6000:]
    assert_same_files(resumed, assert_undisturbed(run_habit(tmp_path / "whole", SCRIPT, habit, "8")))
