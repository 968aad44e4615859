"""Buffers that are None until a forward pass makes them come and go with the state."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.memory_copy import load_block, write_block
from swift_ft.checkpoint.state_payload import StatePayload, tensor_at
from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import TopologyMismatchError


class Late(nn.Module):
    """Makes a centre, and a count of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.centre: torch.Tensor | None
        self.count: torch.Tensor | None
        self.register_buffer("centre", None)
        self.register_buffer("count", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.layer(x)
        if self.centre is None:
            self.centre, self.count = h.detach().double().mean(0), torch.zeros((), dtype=torch.int64)
        assert self.count is not None
        self.count += 1
        return h


def made() -> tuple[TrainingState, Late]:
    torch.manual_seed(0)
    inner = Late()
    model = nn.Sequential(inner, nn.Linear(2, 2))
    return TrainingState({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}), inner


def hand_over(source: TrainingState, target: TrainingState, *, aside: bool) -> None:
    """As a replica does."""
    payload = StatePayload.of(source.to_save())
    filled = target.to_load(payload.kinds, aside=aside)
    for path, tensor in payload.tensors.items():
        tensor_at(filled, path).copy_(tensor)
    filled["plain"]["bytes"] = io.BytesIO(payload.plain)
    target.take_over(filled)
    assert not target.differing_from(filled)


def buffers(module: Late) -> dict[str, Any]:
    return {name: None if b is None else (b.dtype, b.tolist()) for name, b in module._buffers.items()}


@pytest.mark.parametrize("aside", [False, True])
def test_a_replacement_is_given_them(aside: bool) -> None:
    (source, model), (target, other) = made(), made()
    model(torch.ones(4, 3))
    hand_over(source, target, aside=aside)
    assert buffers(other) == buffers(model)
    assert other.count is not model.count
    other(torch.ones(4, 3))
    hand_over(source, target, aside=aside)
    assert buffers(other) == buffers(model)


def test_a_survivor_returns_to_where_there_were_none() -> None:
    state, model = made()
    block = write_block(state, None)
    model(torch.ones(4, 3))
    later = write_block(state, None)
    kept = buffers(model)
    load_block(state, block)
    assert buffers(model) == {"centre": None, "count": None}
    load_block(state, later)
    assert buffers(model) == kept
    source, _ = made()
    hand_over(source, state, aside=True)
    assert buffers(model) == {"centre": None, "count": None}


def test_an_interrupted_step_made_them() -> None:
    state, model = made()
    rollback = Rollback(state)
    rollback.begin(0)
    model(torch.ones(4, 3))
    rollback.back()
    assert buffers(model) == {"centre": None, "count": None}
    assert [*model._buffers] == ["centre", "count"]


@pytest.mark.parametrize("there", [True, False])
def test_other_tensors_that_only_one_side_has(there: bool) -> None:
    """A model that lacks a parameter, or a buffer that was never None, is another model."""
    state, _ = made()
    model = nn.Sequential(Late(), nn.Linear(2, 2))
    model.register_buffer("scale", torch.ones(1))
    other = TrainingState({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    source, target = (other, state) if there else (state, other)
    with pytest.raises(TopologyMismatchError, match="scale"):
        target.check(StatePayload.of(source.to_save()).kinds)
