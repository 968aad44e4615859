"""An owner finds what its share of the microbatches leaves behind, and a helper what the script has set."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swift_ft.errors import CannotHelpError
from swift_ft.runtime.helpers.outside_values import OutsideValues, check_settings
from tests.support.own_modules import own_module


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.inner = nn.Sequential(nn.Linear(2, 2), self.dropout)
        self.losses: list[torch.Tensor] = []
        self.highest = 0.0
        self.last: torch.Tensor | None = None
        self.counts = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("center", torch.zeros(2))

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return (output * self.weight).sum()


def nothing(stage: Stage, criterion: Any) -> None:
    pass


def attribute(stage: Stage, criterion: Any) -> None:
    stage.highest += 1.0


def in_place(stage: Stage, criterion: Any) -> None:
    stage.counts += 1


def collected(stage: Stage, criterion: Any) -> None:
    stage.losses.append(stage(torch.ones(2)).sum())


def with_a_graph(stage: Stage, criterion: Any) -> None:
    stage.last = stage(torch.ones(2))


def new_attribute(stage: Stage, criterion: Any) -> None:
    vars(stage.dropout)["seen"] = 1


def gradient_of_criterion(stage: Stage, criterion: Any) -> None:
    criterion(torch.ones(2)).backward()


def buffer_of_criterion(stage: Stage, criterion: Any) -> None:
    criterion.center += 1


def python(stage: Stage, criterion: Any) -> None:
    random.random()


def numpy(stage: Stage, criterion: Any) -> None:
    np.random.rand()


CASES = [attribute, in_place, collected, with_a_graph, new_attribute, gradient_of_criterion]


@pytest.mark.parametrize("change", [*CASES, buffer_of_criterion, python, numpy])
def test_a_change_is_found(change: Callable[..., None]) -> None:
    stage, criterion = Stage(), Criterion()
    outside = OutsideValues({3: stage}, criterion)
    outside.note()
    change(stage, criterion)
    with pytest.raises(CannotHelpError, match="computing a microbatch changes"):
        outside.check()


def test_a_sum_of_the_loss_function_is_found() -> None:
    total = 0.0

    def loss(output: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += output.sum().item()
        return output.sum()

    outside = OutsideValues({3: Stage()}, loss)
    outside.note()
    loss(torch.ones(2))
    with pytest.raises(CannotHelpError, match=r"changes the loss function\.total"):
        outside.check()


LOSS = """
calls = 0
class Loss:
    def __call__(self, output):
        global calls
        calls += 1
        return output.sum() / calls
"""


def test_a_counter_of_the_loss_functions_file_is_found(tmp_path: Path) -> None:
    with own_module(tmp_path, "loss_of_test", LOSS) as module:
        outside = OutsideValues({3: Stage()}, module.Loss())
        outside.note()
        module.Loss()(torch.ones(2))
        with pytest.raises(CannotHelpError, match=r"changes \(module\) loss_of_test\.calls"):
            outside.check()


def test_gradients_and_parameters_of_stages_are_no_change() -> None:
    """They travel. So do buffers, which are compared elsewhere."""
    stage, criterion = Stage(), Criterion()
    outside = OutsideValues({3: stage}, criterion)
    gradient_of_criterion(stage, criterion)
    outside.note()
    stage(torch.ones(2)).sum().backward()
    outside.check()


def test_settings_that_the_script_changes_are_found() -> None:
    ours, owners = Stage(), Stage()
    here, there = OutsideValues({3: ours}, None), OutsideValues({3: owners}, None)
    owners.last = torch.ones(2)  # a cache that is filled: here it is yet to be
    owners.eval()
    check_settings(here.settings(), there.settings())
    owners.dropout.p = 0.2
    with pytest.raises(CannotHelpError, match=r"stage 3\.dropout\.p is 0\.1 here, .* made it 0\.2"):
        check_settings(here.settings(), there.settings())


def test_small_tensors_are_settings() -> None:
    ours, owners = Stage(), Stage()
    owners.counts = torch.ones(2)
    here, there = OutsideValues({3: ours}, None), OutsideValues({3: owners}, None)
    with pytest.raises(CannotHelpError, match=r"stage 3\.counts is another tensor here"):
        check_settings(here.settings(), there.settings())
