"""What lines before the first step set otherwise in a replacement is as in the process before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import assert_put_back, run_habit

SCRIPT = Path(__file__).parent / "scripts" / "starts.py"
OF_ONE = "kill machine=1 iteration=5 point=optimizer"
GIVEN, UNLIKE = "it goes on with the values of then", "otherwise than that of the worker whose place"


@pytest.mark.parametrize(
    ("habit", "faults", "more"),
    [
        ("resumes itself", OF_ONE, []),
        ("resumes itself", f"{OF_ONE}; kill machine=0 iteration=5 point=optimizer", []),
        (
            "resumes itself",
            "kill machine=1 iteration=5 point=backward microbatch=1 committed=3",
            ["pipeline"],
        ),
        ("numbers its folders", "kill machine=0 iteration=5 point=optimizer", []),
    ],
    ids=["a replica", "all of them", "a stage", "folders"],
)
def test_what_was_alike_on_all_machines(habit: str, faults: str, more: list[str], tmp_path: Path) -> None:
    run = assert_put_back(tmp_path, SCRIPT, habit, *more, inject=faults)
    assert GIVEN in run.output, run.output[-6000:]
    assert UNLIKE not in run.output, run.output[-6000:]


def test_what_was_a_machines_own_is_named(tmp_path: Path) -> None:
    run = run_habit(tmp_path, SCRIPT, "notes the time", inject=OF_ONE)
    assert run.code == 0, run.output[-6000:]
    assert f"this script has set (loop).began before its first step {UNLIKE}" in run.output, run.output[
        -6000:
    ]
    assert GIVEN not in run.output
