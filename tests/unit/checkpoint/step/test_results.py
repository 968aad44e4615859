"""What is noted of a script does not keep the results of earlier steps in memory."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState

LARGE = 2**19
"""Elements: two or four MiB."""


class Outputs(OrderedDict[str, Any]):
    """As those of models of Hugging Face, a library."""


Outputs.__module__ = "transformers.utils.generic"


AROUND: dict[str, Callable[[Any], Any]] = {
    "a dictionary": lambda one: {"logits": one, "count": 1},
    "a list": lambda one: [one],
    "a ring": lambda one: deque([one]),
    "of an own class": lambda one: Outputs(logits=one),
    "lists in a list": lambda one: [[one], [0]],
    "tuples in a dictionary": lambda one: {"past": ((one, 0), (1, 2))},
}


def with_graph() -> torch.Tensor:
    return 2 * torch.zeros(LARGE, requires_grad=True)


class Made:
    """Makes the results of steps, and knows which ones are still there."""

    def __init__(self, make: Callable[[], Any], around: Callable[[Any], Any]) -> None:
        self._make, self._around = make, around
        self._all: list[weakref.ref[Any]] = []

    def __call__(self) -> Any:
        one = self._make()
        self._all.append(weakref.ref(one))
        return self._around(one)

    def alive(self) -> list[int]:
        return [step for step, one in enumerate(self._all) if one() is not None]


@pytest.fixture
def rollback() -> Rollback:
    return Rollback(TrainingState({"model": nn.Linear(1, 1)}))


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("make", [lambda: torch.zeros(LARGE), lambda: np.zeros(LARGE), with_graph])
def test_some_steps_later_they_are_gone(make: Callable[[], Any], around: str, rollback: Rollback) -> None:
    """Looks for all that there is come in the first steps, and in the 16th."""
    made = Made(make, AROUND[around])
    for iteration in range(20):
        rollback.begin(iteration)
        outputs = made()
    assert {*made.alive()} <= {15, 16, 17, 18, 19}, "that of step 14 was there as the look came"
    assert outputs


@pytest.mark.parametrize("around", [one for one in AROUND if "lists" not in one])
def test_outputs_with_a_graph_are_not_held_at_all(around: str, rollback: Rollback) -> None:
    made = Made(with_graph, AROUND[around])
    outputs = None
    for iteration in range(20):
        rollback.begin(iteration)
        outputs = None
        assert made.alive() in ([], [iteration - 1]), "Python may have one in its own copy of the variables"
        outputs = made()
    assert outputs


def test_what_a_script_keeps_is_still_put_back(rollback: Rollback) -> None:
    """A container with large tensors that lasts, one within it, and new elements of it."""
    bank: Any = {"queue": torch.zeros(LARGE), "count": 0, "rows": [[0], torch.zeros(LARGE)]}
    for iteration in range(20):
        rollback.begin(iteration)
        bank["count"] += 1
        bank["rows"][0][0] += 1
    bank["new"] = [0]
    rollback.begin(20)
    bank["count"], bank["rows"][0][0], bank["new"][0] = 0, 0, 1
    queue, bank["queue"] = bank["queue"], None
    rollback.back()
    assert (bank["count"], bank["rows"][0], bank["new"]) == (20, [20], [0])
    assert bank["queue"] is queue
