"""A program's files are edited while it runs: whatever is started later runs what the others run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.cluster import ClusterRun
from tests.support.habits import run_habit
from tests.support.integrations import assert_same_files

PROGRAM = Path(__file__).parent / "scripts" / "edited"
KILL = "kill machine=1 iteration=5 point=reduce bucket=0"


def run_edited(folder: Path, habit: str, *, inject: str = "", flags: list[str] | None = None) -> ClusterRun:
    """Runs a copy of the program, which edits itself in iteration 3."""
    copy = shutil.copytree(PROGRAM, folder / "edited")
    script = Path("edited.train") if flags and "-m" in flags else copy / "train.py"
    run = run_habit(folder, script, habit, inject=inject, flags=flags)
    assert run.code == 0, run.output[-6000:]
    assert (copy / "edited").exists(), "the edit was made"
    assert "EDITED" not in run.output
    return run


@pytest.mark.parametrize("habit", ["save", "checkout"])
def test_a_spare_runs_what_the_run_began_with(habit: str, tmp_path: Path) -> None:
    undisturbed = run_edited(tmp_path / "undisturbed", habit)
    run = run_edited(tmp_path / "disturbed", habit, inject=KILL)
    assert run.recoveries
    assert_same_files(run, undisturbed)
    assert "changed since this run began" in run.output


def test_a_machine_that_is_started_anew_and_a_module_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a spare: the machine in the lost one's place is forked after the edit."""
    runs = []
    for name, inject in (("undisturbed", ""), ("disturbed", KILL)):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        runs.append(run_edited(folder, "save", inject=inject, flags=["--spares", "0", "-m"]))
    assert runs[1].recoveries
    assert_same_files(runs[1], runs[0])


def test_a_guest_runs_what_the_run_began_with(tmp_path: Path) -> None:
    flags = ["--spares", "0", "--no-replacement", "--elastic-wait", "0"]
    undisturbed = run_edited(tmp_path / "undisturbed", "save")
    run = run_edited(tmp_path / "disturbed", "save", inject=KILL, flags=flags)
    assert [event for event in run.events("MachineJoined") if event["host"]], "a guest came"
    assert_same_files(run, undisturbed)
