"""The stages of a scaler's gradients are told, and put back."""

from __future__ import annotations

import pytest
import torch

from swift_ft.torch_core.scalers import put_stages, stages_of


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(3))
    return torch.optim.SGD([weight], lr=0.1)


def backward(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    (weight,) = optimizer.param_groups[0]["params"]
    weight.grad = None
    scaler.scale(weight.sum()).backward()


def test_unscaled_twice_and_updated(optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    backward(scaler, optimizer)
    assert stages_of(scaler) == {}
    scaler.unscale_(optimizer)
    unscaled = stages_of(scaler)
    assert unscaled.keys() == {id(optimizer)}
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    put_stages(scaler, {})
    backward(scaler, optimizer)
    scaler.unscale_(optimizer)
    put_stages(scaler, unscaled)
    scaler.step(optimizer)
    assert stages_of(scaler) != unscaled
    scaler.update()
    assert stages_of(scaler) == {}
    (weight,) = optimizer.param_groups[0]["params"]
    assert weight.grad.tolist() == [1, 1, 1]


def test_a_scaler_that_is_off_has_none() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    put_stages(scaler, stages_of(scaler))
    assert stages_of(scaler) == {}
