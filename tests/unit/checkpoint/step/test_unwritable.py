"""Tensors that torch does not let anyone write to as a whole, or that are in a memory of another kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.torch_core.tensors import same_bits, version_of


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4)


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.quint8)


def add_inferred(tensor: torch.Tensor) -> None:
    with torch.inference_mode():
        tensor.add_(1)


KINDS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any]]] = {
    "expanded": (lambda: torch.zeros(1).expand(4), lambda t: t[0].add_(1)),
    "expanded between others": (lambda: torch.zeros(2, 1, 3).expand(2, 4, 3), lambda t: t[1, 0].add_(1)),
    "expanded from nothing": (lambda: torch.tensor(0.0).expand(2, 3), lambda t: t[1, 2].add_(1)),
    "inference": (inferred, add_inferred),
    "expanded inference": (lambda: inferred()[:1].expand(4), lambda t: add_inferred(t[0])),
    "overlapping": (lambda: torch.zeros(4).unfold(0, 2, 1), lambda t: t[0].add_(1)),
    "negative": (lambda: torch.zeros(4, dtype=torch.complex64).conj().imag, lambda t: t.add_(1)),
    "quantized": (quantized, lambda t: t.copy_(torch.ones(4))),
}


@pytest.fixture
def net() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.fixture
def rollback(net: nn.Module) -> Rollback:
    return Rollback(TrainingState({"model": net}))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_an_attribute(kind: str, net: nn.Module, rollback: Rollback) -> None:
    """It stays the same tensor, and what has changed in it is put back."""
    make, change = KINDS[kind]
    held: Any = net
    held.position = tensor = make()
    before = tensor.clone()
    rollback.begin(0)
    rollback.back()
    rollback.begin(1)
    change(tensor)
    assert not same_bits(tensor, before)
    held.position = None
    rollback.back()
    assert held.position is tensor
    assert same_bits(tensor, before)


@pytest.mark.parametrize("kind", ["expanded", "inference", "expanded inference"])
def test_a_buffer(kind: str, net: nn.Module, rollback: Rollback) -> None:
    make, change = KINDS[kind]
    net.register_buffer("position", tensor := make())
    rollback.begin(0)
    change(tensor)
    rollback.back()
    assert net.get_buffer("position") is tensor
    assert not tensor.any()


def test_an_attribute_that_is_large(net: nn.Module, rollback: Rollback) -> None:
    """Where a whole step may have to be put back, it has a copy as parameters have one."""
    held: Any = net
    held.mask = tensor = torch.zeros(2, 1, 2**18).expand(2, 4, 2**18)
    rollback.begin(0, whole=True)
    tensor[1, 0, 5] = 1
    rollback.back()
    assert not tensor.any()


def test_nothing_is_written_where_nothing_has_changed(net: nn.Module, rollback: Rollback) -> None:
    """A file that is mapped for reading ends a process that writes to its memory."""
    held: Any = net
    held.table, held.array = torch.zeros(4), np.zeros(4)
    net.register_buffer("buffer", torch.zeros(4))
    kept: dict[str, Any] = {"table": torch.zeros(4), "count": 0}
    written = [held.table, net.get_buffer("buffer"), kept["table"]]
    rollback.begin(0)
    versions = [*map(version_of, written)]
    held.array.flags.writeable = False
    kept["count"] += 1
    rollback.back()
    assert [*map(version_of, written)] == versions
    assert kept["count"] == 0
