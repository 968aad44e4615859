"""What a script changes in place and is too large to be noted is found by name."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from swift_ft.checkpoint.step.large_values import LargeValues
from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState

LARGE, SMALL = 300_000, 1_000


class Bank:
    """An object of the script's own."""

    def __init__(self) -> None:
        self.array = np.zeros(LARGE)
        self.still = np.zeros(LARGE)
        self.tensor = torch.zeros(LARGE)
        self.replaced = torch.zeros(LARGE)
        self.small = np.zeros(SMALL)
        self.samples = [torch.zeros(1) for _ in range(2000)]
        self.losses = [0.0] * 2000


def test_only_what_changes_in_place_and_is_large() -> None:
    bank, model = Bank(), nn.Linear(700, 700)
    values = LargeValues(Rollback(TrainingState({"model": model})).variables)
    values.note()
    assert values.changed() == []
    bank.array[5] = bank.small[5] = 1.0
    bank.tensor[5] = 1.0
    bank.samples[7] += 1
    bank.losses[7] = 1.0  # put back
    bank.replaced = torch.ones(LARGE)
    with torch.no_grad():
        model.weight.add_(1.0)  # of the state: put back in another way
    assert sorted(values.changed()) == ["bank.array", "bank.samples", "bank.tensor"]
