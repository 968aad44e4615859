"""The times of a module's layers are measured without changing a bit of what it computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from swift_ft.runtime.elastic.layer_profiler import LayerTimes, layers_of


class Slow(torch.autograd.Function):
    """Takes its time forward and backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return value * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return gradient * 1


class Layer(nn.Module):
    """A linear layer that may take long."""

    def __init__(self, slow: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._slow: Callable[[torch.Tensor], torch.Tensor] = Slow.apply if slow else torch.relu

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self._slow(self.linear(value))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(False), nn.Sequential(Layer(True), nn.Tanh()), Layer(False))


def trained(module: nn.Module, times: LayerTimes | None) -> list[torch.Tensor]:
    """Three steps of two microbatches each; returns the weights."""
    optimizer = torch.optim.AdamW(module.parameters())
    generator = torch.Generator().manual_seed(1)
    if times is not None:
        times.start()
    for _ in range(3):
        for _ in range(2):
            module(torch.randn(4, 8, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if times is not None:
        times.stop()
        measured = times.layers([optimizer])
        assert [layer.name for layer in measured] == ["0", "1.0", "1.1", "2"]
        first, slow, activation, last = measured
        assert slow.forward_ns >= 10_000_000 > first.forward_ns > 0
        assert slow.backward_ns >= 30_000_000 > last.backward_ns > 0
        assert first.backward_ns > 0, "the first layer's input needs no gradient; its weights do"
        weights = 4 * (8 * 8 + 8)
        assert first.state_bytes == 4 * weights + 2 * 4  # weights, gradients, two moments; a step for each
        assert activation.state_bytes == 0
        assert first.activation_bytes >= 4 * 8 * 4
    return [parameter.detach().clone() for parameter in module.parameters()]


def test_layers_are_measured_and_no_bit_changes() -> None:
    plain = trained(model(), None)
    module = model()
    measured = trained(module, LayerTimes(module))
    assert all(map(torch.equal, plain, measured))
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())


def test_a_layer_that_shares_weights_says_with_which() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    assert isinstance(module[0], nn.Linear)
    assert isinstance(module[2], nn.Linear)
    module[2].weight = module[0].weight
    first, _, last = LayerTimes(module).layers([])
    assert (first.shared_with, last.shared_with) == (None, 0)
    assert (first.state_bytes, last.state_bytes) == (2 * 4 * 72, 2 * 4 * 8)


def test_validation_is_not_measured() -> None:
    module = model()
    times = LayerTimes(module)
    times.start()
    with torch.no_grad():
        module(torch.ones(1, 8))
    times.stop()
    assert all(layer.forward_ns == 0 for layer in times.layers([]))


def test_layers_of_lists_are_layers() -> None:
    module = nn.ModuleDict({"in": nn.Linear(1, 1), "blocks": nn.ModuleList([nn.Linear(1, 1), nn.ReLU()])})
    assert list(layers_of(module)) == ["in", "blocks.0", "blocks.1"]
    assert list(layers_of(nn.Linear(1, 1))) == ["whole"]
