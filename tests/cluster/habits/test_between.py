"""Functions between two steps that keep what they know in variables: a repetition begins as they did."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import assert_put_back, run_habit
from tests.support.integrations import assert_same_files

SCRIPT = Path(__file__).parent / "scripts" / "between.py"


def test_a_patience_of_replicas(tmp_path: Path) -> None:
    """Lost in the step after it: all do the function again, and what follows from it follows once."""
    faults = "kill machine=1 iteration=4 point=reduce; kill machine=0 iteration=6 point=reduce"
    run = assert_put_back(tmp_path, SCRIPT, "a patience", inject=faults)
    assert [recovery["mode"] for recovery in run.recoveries] == ["replica", "replica"]


@pytest.mark.parametrize("at", ["iteration=6", "iteration=4 committed=4"])
def test_a_patience_in_a_pipeline(at: str, tmp_path: Path) -> None:
    """What is loaded from a checkpoint of that very place has what follows already."""
    faults = f"kill machine=1 {at} point=backward microbatch=1"
    run = assert_put_back(tmp_path, SCRIPT, "a patience", "pipeline", inject=faults)
    assert [recovery["mode"] for recovery in run.recoveries] != []


def test_a_counter_in_forward(tmp_path: Path) -> None:
    """An evaluation counts, as it does in an undisturbed run: a replay has none, and is given its counts."""
    faults = "kill machine=1 iteration=6 point=backward microbatch=1 committed=4; kill machine=0 iteration=9"
    run = assert_put_back(
        tmp_path, SCRIPT, "a counter in forward", "pipeline", inject=f"{faults} point=forward"
    )
    assert [recovery["mode"] for recovery in run.recoveries] == ["replay", "replay"]


def test_in_the_function_itself(tmp_path: Path) -> None:
    faults = "kill machine=1 iteration=4 point=reduce; kill machine=0 iteration=6 point=reduce"
    assert_put_back(tmp_path, SCRIPT, "in the function itself", inject=faults)


def test_averaged_weights(tmp_path: Path) -> None:
    """The survivor has them in place of its own, as a sample says: all go on from the last checkpoint."""
    undisturbed = run_habit(tmp_path / "undisturbed", SCRIPT, "averaged weights")
    run = run_habit(tmp_path / "disturbed", SCRIPT, "averaged weights, lost among them")
    assert run.code == 0, run.output[-6000:]
    assert [recovery["mode"] for recovery in run.recoveries] == ["restart"], run.output[-6000:]
    assert "had other values, as averaged weights" in run.output
    assert_same_files(run, undisturbed)


def test_an_exit_where_it_was_interrupted(tmp_path: Path) -> None:
    """Exit code 0 of the survivor is not the end of its training: its process begins again."""
    undisturbed = run_habit(tmp_path / "undisturbed", SCRIPT, "undisturbed")
    run = run_habit(tmp_path / "disturbed", SCRIPT, "exits")
    assert run.code == 0, run.output[-6000:]
    again = [lost["reason"] for lost in run.events("MachineLost") if lost.get("starts_again")]
    assert len(again) == 1
    assert "worker 1: its script has ended with exit code 0 where it was interrupted" in again[0]
    assert_same_files(run, undisturbed)


def test_lost_as_it_is_saved(tmp_path: Path) -> None:
    """The other replica has noted the best loss already, and goes back to before it did."""
    undisturbed = run_habit(tmp_path / "undisturbed", SCRIPT, "undisturbed")
    run = run_habit(tmp_path / "disturbed", SCRIPT, "lost as it is saved")
    assert run.code == 0, run.output[-6000:]
    assert [recovery["slots"] for recovery in run.recoveries] == [[0]]
    assert_same_files(run, undisturbed)
