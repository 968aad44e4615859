"""A data loader's process that a signal ends is a lost machine; what a data set raises is the script's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import run_habit
from tests.support.integrations import assert_same_files

SCRIPT = Path(__file__).parent / "scripts" / "loads_data.py"


@pytest.mark.parametrize(("how", "name"), [("killed", "Killed"), ("bus", "Bus error")])
def test_a_killed_process_is_a_lost_machine(tmp_path: Path, how: str, name: str) -> None:
    undisturbed = run_habit(tmp_path / "undisturbed", SCRIPT, "undisturbed")
    run = run_habit(tmp_path / "disturbed", SCRIPT, how)
    assert run.code == 0, run.output[-3000:]
    (recovery,) = run.recoveries
    assert recovery["slots"] == [1]
    (reason,) = recovery["reasons"]
    assert reason.startswith("worker 1: a process of a data loader was killed by ")
    assert name in reason or "SIG" in reason
    assert not run.events("ScriptFailed")
    assert_same_files(run, undisturbed)


def test_what_a_data_set_raises_is_an_error_of_the_script(tmp_path: Path) -> None:
    run = run_habit(tmp_path, SCRIPT, "raises")
    assert run.code == 1
    assert "row 8 is damaged" in run.output
    assert not run.recoveries
