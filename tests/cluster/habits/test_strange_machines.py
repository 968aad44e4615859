"""A machine that is not like the others costs itself, and never the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import assert_put_back, refusal, run_habit

SCRIPT = Path(__file__).parent / "scripts" / "strange_machine.py"
SESSION = SCRIPT.with_name("strange_session.py")
KILL = "kill machine=1 iteration=5 point=reduce bucket=0"


def test_a_machine_with_another_model_is_given_up(tmp_path: Path) -> None:
    run = assert_put_back(tmp_path, SCRIPT, "model", inject=KILL)
    (failed,) = run.events("ScriptFailed")
    assert failed["usage"]
    assert "12" in failed["reason"], "both shapes are named"


def test_a_machine_without_the_data_is_given_up(tmp_path: Path) -> None:
    run = assert_put_back(tmp_path, SCRIPT, "data", inject=KILL)
    (failed,) = run.events("ScriptFailed")
    assert "no-data-here" in failed["reason"]


@pytest.mark.thorough
def test_what_each_further_machine_does_is_the_program_itself(tmp_path: Path) -> None:
    """The second one that fails in the same way ends the run, in one line, and with a usage error's code."""
    run = run_habit(tmp_path, SCRIPT, "model-all", inject=KILL, flags=["--elastic-wait", "0"])
    assert run.code == 2, run.output[-3000:]
    assert len(run.events("ScriptFailed")) == 2


@pytest.mark.parametrize(
    ("habit", "named"),
    [
        ("checkpoint_every", "Session(checkpoint_every) is 5 here and 3 in the job"),
        ("seed", "Session(seed) is 1 here and 0 in the job"),
        ("verify", "Session(verify) is none here and digest in the job"),
        pytest.param("keep_checkpoints", "Session(keep_checkpoints) is 1 here", marks=pytest.mark.thorough),
        ("module", "the module scale is "),
    ],
)
def test_a_machine_that_runs_another_program_is_given_up(habit: str, named: str, tmp_path: Path) -> None:
    run = assert_put_back(tmp_path, SESSION, habit, inject=KILL)
    (failed,) = run.events("ScriptFailed")
    assert failed["differs"]
    assert named in failed["reason"]
    assert run.output.count(named) >= 1


def test_first_machines_that_disagree_are_an_error(tmp_path: Path) -> None:
    line = refusal(tmp_path, SESSION, "first-checkpoint_every")
    assert "runs another program than the job: Session(checkpoint_every) is " in line
