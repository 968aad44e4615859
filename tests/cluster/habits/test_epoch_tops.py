"""Lines at the top of an epoch: a replacement that begins in its middle runs them as they were run before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.habits import assert_put_back, run_habit
from tests.support.integrations import assert_same_files

SCRIPT = Path(__file__).parent / "scripts" / "epoch_tops.py"

HABITS = (
    "own draw", "permutation", "global draws", "tau", "rank", "scheduler", "rate", "decay", "teacher",
    "shrink", "momentum", "norm", "group",
)  # fmt: skip
CHOSEN = {("nested", "all", 4, 1), ("function", "all", 6, 1)}
"""In the middle of an epoch, and in the first step of one."""


def cases() -> Iterator[Any]:
    together = product(("nested", "function"), ("all",), (4, 5, 6), (0, 1))
    for case in (*together, *product(("nested",), HABITS, (4, 6), (1,))):
        yield pytest.param(*case, marks=() if case in CHOSEN else pytest.mark.thorough)


@pytest.mark.parametrize(("form", "habit", "iteration", "machine"), [*cases()])
def test_a_loss(form: str, habit: str, iteration: int, machine: int, tmp_path: Path) -> None:
    inject = f"kill machine={machine} iteration={iteration} point=reduce"
    assert_put_back(tmp_path, SCRIPT, form, habit, inject=inject)


DRAWS = "own draw+permutation+global draws+tau+scheduler+rate+decay"
TENSORS = "own draw+shrink+momentum+teacher"


def returns() -> Iterator[Any]:
    for form, habits, kind, iteration in product(
        ("nested", "function"),
        (DRAWS, TENSORS),
        ("memory", "memory-borders", "checkpoints", "checkpoints-borders"),
        (5, 6, 7),
    ):
        chosen = (form, habits, kind, iteration) == ("nested", TENSORS, "memory-borders", 7)
        marks = () if chosen else pytest.mark.thorough
        yield pytest.param(form, habits, kind, iteration, marks=marks)


@pytest.mark.parametrize(("form", "habits", "kind", "iteration"), [*returns()])
def test_all_return(form: str, habits: str, kind: str, iteration: int, tmp_path: Path) -> None:
    lost = (1,) if kind.startswith("memory") else (0, 1)
    inject = "; ".join(f"kill machine={machine} iteration={iteration} point=optimizer" for machine in lost)
    run = assert_put_back(tmp_path, SCRIPT, form, habits, kind, inject=inject)
    assert "the lines at the top of the epoch have set" not in run.output


@pytest.mark.parametrize(
    ("form", "habits", "kind"),
    [
        pytest.param(*case, marks=() if case == ("function", DRAWS, "checkpoints") else pytest.mark.thorough)
        for case in product(("nested", "function"), (DRAWS, TENSORS), ("checkpoints", "checkpoints-borders"))
    ],
)
def test_a_resumed_run(form: str, habits: str, kind: str, tmp_path: Path) -> None:
    undisturbed = run_habit(tmp_path / "undisturbed", SCRIPT, form, habits, kind)
    assert undisturbed.code == 0, undisturbed.output[-6000:]
    folder = tmp_path / "resumed"
    folder.mkdir()
    (folder / "fails").touch()
    failed = run_habit(folder, SCRIPT, form, habits, kind)
    assert "as the test has asked for" in failed.output
    assert failed.code != 0
    (folder / "fails").unlink()
    run = run_habit(folder, SCRIPT, form, habits, kind, flags=["--resume"])
    assert run.code == 0, run.output[-6000:]
    assert_same_files(run, undisturbed)


def test_a_value_that_is_made_of_weights_is_named(tmp_path: Path) -> None:
    """The checkpoint of iteration 4 is from before replicas were compared: each might have its own."""
    inject = "; ".join(f"kill machine={machine} iteration=7 point=optimizer" for machine in range(2))
    run = run_habit(tmp_path, SCRIPT, "nested", "norm", "checkpoints", inject=inject)
    assert run.code == 0, run.output[-6000:]
    assert "the lines at the top of the epoch have set (loop).factors, factors to other values" in run.output
