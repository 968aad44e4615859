"""Large state is put back in other ways. A tensor that comes to its memory once it is gone is none of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState


class Meter:
    """A part of the state that saves copies."""

    def __init__(self) -> None:
        self.total = torch.zeros(5)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total.clone()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.total = saved["total"]


@pytest.fixture
def net() -> nn.Linear:
    return nn.Linear(5, 1)


def with_gradients(net: nn.Linear) -> None:
    net.zero_grad()
    net(torch.ones(5)).backward()


@pytest.mark.parametrize("freed", ["a gradient", "a copy of a part", "a parameter"])
def test_younger_tensors_where_others_were(freed: str, net: nn.Linear) -> None:
    """The looks of the first steps saw what is freed; the next one comes in the 16th."""
    state: dict[str, Any] = {"model": net}
    if freed == "a copy of a part":
        state["meter"] = Meter()
    rollback = Rollback(TrainingState(state))
    for iteration in range(4):
        if freed == "a gradient":
            with_gradients(net)
        rollback.begin(iteration)
    net.zero_grad()
    if freed == "a parameter":
        net.weight = nn.Parameter(torch.zeros(1, 5))
    younger = [torch.zeros(1, 5) for _ in range(500)]
    rollback.begin(4)
    for one in younger:
        one.add_(1)
    rollback.back()
    assert not any(one.any() for one in younger)


@pytest.mark.parametrize("held", ["a gradient", "a part of one", "one that is no gradient any more"])
def test_gradients_that_a_script_holds(held: str, net: nn.Linear) -> None:
    """An undo needs them as they are. One that the script keeps for itself is the script's own."""
    rollback = Rollback(TrainingState({"model": net}))
    for iteration in range(4):
        rollback.begin(iteration)
    with_gradients(net)
    assert net.weight.grad is not None
    kept = net.weight.grad[0] if held == "a part of one" else net.weight.grad
    own = held == "one that is no gradient any more"
    if own:
        net.zero_grad()
    rollback.begin(4)
    kept.add_(1)
    rollback.back()
    assert kept.eq(1 if own else 2).all()
