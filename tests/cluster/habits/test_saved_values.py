"""What is saved can be read: NumPy's numbers, deques, enums, dataclasses, and a module's extra state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import assert_put_back, refusal, run_habit
from tests.support.integrations import assert_same_files

SCRIPT = Path(__file__).parent / "scripts" / "saved_values.py"
POINTS = {"ddp": "reduce bucket=0", "pipeline": "forward", "memory": "optimizer"}


@pytest.mark.parametrize(
    ("habit", "form"),
    [("extra-dict", "pipeline"), ("extra-file", "memory"), ("extra-grows", "ddp")],
)
def test_a_loss_leaves_them_as_they_were(tmp_path: Path, habit: str, form: str) -> None:
    assert_put_back(tmp_path, SCRIPT, habit, form, inject=f"kill machine=1 iteration=5 point={POINTS[form]}")


def test_a_run_is_resumed_with_them(tmp_path: Path) -> None:
    habit, form = "extra-grows", "pipeline"
    undisturbed = run_habit(tmp_path / "undisturbed", SCRIPT, habit, form, "8")
    first = run_habit(tmp_path / "resumed", SCRIPT, habit, form, "6")
    assert (undisturbed.code, first.code) == (0, 0), first.output[-6000:]
    run = run_habit(tmp_path / "resumed", SCRIPT, habit, form, "8", flags=["--resume"])
    assert run.code == 0, run.output[-6000:]
    assert_same_files(run, undisturbed)


def test_what_could_not_be_read_is_refused_before_the_first_step(tmp_path: Path) -> None:
    line = refusal(tmp_path, SCRIPT, "odd", "ddp")
    assert "meter['history'][3] is a __main__.Foreign" in line
    assert "give plain values" in line
