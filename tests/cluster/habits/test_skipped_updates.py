"""Scripts that do not update in each iteration: a loss takes back the last iteration, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import run_habit
from tests.support.integrations import assert_same_files

SCRIPT = Path(__file__).parent / "scripts" / "skips_updates.py"


@pytest.mark.parametrize("habit", ["some iterations", "two optimizers"])
def test_an_iteration_without_an_update_is_taken_back(tmp_path: Path, habit: str) -> None:
    flags = ["--nproc-per-node", "2"]
    undisturbed = run_habit(tmp_path / "undisturbed", SCRIPT, habit, "none", flags=flags)
    assert undisturbed.code == 0, undisturbed.output[-6000:]
    run = run_habit(tmp_path / "disturbed", SCRIPT, habit, "lost", flags=flags)
    assert run.code == 0, run.output[-6000:]
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replica", run.output[-3000:]
    (back,) = {tuple(r for r, task in run.last_plan().tasks.items() if task.back)}
    assert back == (0,)  # worker 2 was on the lost machine
    assert_same_files(run, undisturbed)
