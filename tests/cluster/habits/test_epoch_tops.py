"""Lines at the top of an epoch: a replacement that begins in its middle runs them as they were run before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.habits import assert_put_back

SCRIPT = Path(__file__).parent / "scripts" / "epoch_tops.py"

HABITS = (
    "own draw", "permutation", "global draws", "tau", "rank", "scheduler", "rate", "decay", "teacher",
    "shrink", "momentum", "norm",
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
