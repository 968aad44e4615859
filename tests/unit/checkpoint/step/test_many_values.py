"""Many tensors and arrays that a script keeps are not copied in each step, such as batches for validation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState

ROOM, SIZE, COUNT = 2**16, 2**13, 64
"""Bytes that are copied, bytes of a value, and values: eight times as much as there is room for."""


@pytest.fixture
def rollback(monkeypatch: pytest.MonkeyPatch) -> Rollback:
    monkeypatch.setattr("swift_ft.checkpoint.step.leaves.MOST_BYTES_IN_ALL", ROOM)
    return Rollback(TrainingState({"model": nn.Linear(1, 1)}))


def copied(rollback: Rollback) -> int:
    assert rollback._now is not None
    values = [getattr(leaf, "_value", None) for leaf in rollback._now.variables.leaves.values()]
    return sum(one.nbytes for one in values if isinstance(one, torch.Tensor | np.ndarray))


def values(kind: str) -> list[Any]:
    if kind == "tensors":
        return [torch.zeros(SIZE // 4) for _ in range(COUNT)]
    return [np.zeros(SIZE // 8) for _ in range(COUNT)]


@pytest.mark.parametrize("kind", ["tensors", "arrays"])
def test_what_does_not_change_is_not_copied(kind: str, rollback: Rollback) -> None:
    held = values(kind)
    for iteration in range(5):
        rollback.begin(iteration)
        assert iteration < 3 or copied(rollback) <= ROOM
    assert rollback.dirty() is None
    assert held


@pytest.mark.parametrize("kind", ["tensors", "arrays"])
@pytest.mark.parametrize("first", [0, 10])
def test_what_changes_is_copied_from_then_on(kind: str, first: int, rollback: Rollback) -> None:
    """In whatever step it does so first: in this step alone there may be no copy."""
    held, steps = values(kind), 0
    for iteration in range(first + 2):
        rollback.begin(iteration)
        if iteration >= first:
            held[-1][3] += 1
            steps += 1
    assert rollback.dirty() is None
    assert copied(rollback) <= ROOM + SIZE or first == 0
    rollback.back()
    assert held[-1][3] == steps == 1
    assert not held[-2].any()


def test_all_is_copied_in_the_first_step(rollback: Rollback) -> None:
    held = values("tensors")
    rollback.begin(0)
    for one in held:
        one.add_(1)
    assert rollback.dirty() is None
    rollback.back()
    assert not any(one.any() for one in held)


@pytest.mark.parametrize("kind", ["tensors", "arrays"])
def test_a_first_change_in_an_interrupted_step_is_said(kind: str, rollback: Rollback) -> None:
    held = values(kind)
    for iteration in range(5):
        rollback.begin(iteration)
    held[-1][3] += 1
    reason = rollback.dirty()
    assert reason is not None
    assert "of 8.19 kB, which the script keeps, in place for the first time" in reason


def test_a_step_that_is_computed_twice_has_copies_of_all(rollback: Rollback) -> None:
    held = values("tensors")
    for iteration in range(5):
        rollback.begin(iteration, whole=iteration == 4)
    held[-1].add_(1)
    rollback.back()
    assert not held[-1].any()
