"""Hooks that a step registers or removes are put back; what a later step leaves behind is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import assert_put_back, refusal, run_habit

SCRIPT = Path(__file__).parent / "scripts" / "hooks.py"
IN_BACKWARD = "kill machine=1 iteration=3 point=reduce committed=3; kill machine=0 iteration=5 point=reduced"


@pytest.mark.parametrize("habit", ["within each step", "removed within each step"])
def test_put_back(habit: str, tmp_path: Path) -> None:
    assert_put_back(tmp_path, SCRIPT, habit, inject=IN_BACKWARD)


@pytest.mark.parametrize("inject", ["", "kill machine=1 iteration=3 point=reduce committed=3"])
@pytest.mark.parametrize(("habit", "hook"), [("from step 3 on", "halve"), ("until step 3", "shift")])
def test_refused_in_the_next_step(habit: str, hook: str, inject: str, tmp_path: Path) -> None:
    """A replacement would not have registered it, or still had it, whatever comes later."""
    line = refusal(tmp_path, SCRIPT, habit, inject=inject)
    assert f"A step has registered or removed hooks ({hook})" in line
    assert "Register them before the first step" in line


def test_parameters_that_are_renamed(tmp_path: Path) -> None:
    """A replacement has the names of the script's beginning, and says so."""
    fault = "kill machine=1 iteration=4 point=reduce committed=3"
    run = run_habit(tmp_path, SCRIPT, "pruned in step 2", inject=fault)
    assert run.code == 2, run.output[-6000:]
    lines = {line for line in run.output.splitlines() if line.startswith("swift-run: ")}
    (line,) = lines  # of each machine that was tried
    assert "weight_orig, and this process has nothing of that name" in line
    assert "Traceback" not in run.output
