"""Things that the top of the first epoch alone makes, in a process that begins exactly between two epochs."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState


class Average:
    def __init__(self) -> None:
        self.weights = torch.zeros(2)
        self.updates = 0


def made_for(kind: str) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "an object": Average,
        "a generator": torch.Generator,
        "a list with one": lambda: [torch.Generator()],
        "a number": lambda: 3,
    }
    return made[kind]()


def trained(kind: str, epoch: int, *, each: bool = False, arrives: Any = None) -> tuple[Any, Any]:
    """The variables that one epoch leaves, or that a process has which begins with it; and what is made."""
    made, holder = None, SimpleNamespace(made=None)
    rollback = Rollback(TrainingState({"model": nn.Linear(1, 1)}))
    carried = rollback.carried
    carried.epoch_begins()  # as a loop over epochs starts
    rollback.watch()
    if arrives is not None:
        carried.take_over(arrives)
    carried.epoch_begins()
    if epoch == 0 or each:
        made = made_for(kind)
        holder.made = random.Random(1) if kind == "a generator" else None
    carried.top_is_over()
    if carried.arrived is not None:
        carried.say_what_is_missing(carried.arrived)
    rollback.begin(epoch)
    rollback.completed()
    return carried.to_save(), made


NAMED: list[tuple[str, set[str]]] = [
    ("an object", {"made.weights", "made.updates"}),  # one of them stands for it
    ("a generator", {"(epochs).made", "holder.made"}),
    ("a list with one", {"(epochs).made"}),
    ("a number", set()),
]


@pytest.mark.parametrize(("kind", "expected"), NAMED)
def test_what_is_lost_is_named(kind: str, expected: set[str], caplog: pytest.LogCaptureFixture) -> None:
    """The top of a later epoch makes none of it, so it is named after that. A number is given."""
    saved, _ = trained(kind, 0)
    assert not caplog.records
    _, made = trained(kind, 1, arrives=saved)
    named = [vars(one)["variable"] for one in caplog.records]
    assert len(named) == (1 if kind == "an object" else len(expected))
    assert {*named} <= expected
    assert (made == 3) == (kind == "a number")


@pytest.mark.parametrize(("kind", "_"), NAMED)
def test_what_each_epoch_makes_is_not(kind: str, _: Any, caplog: pytest.LogCaptureFixture) -> None:
    saved, _ = trained(kind, 0, each=True)
    trained(kind, 1, each=True, arrives=saved)
    assert not caplog.records
