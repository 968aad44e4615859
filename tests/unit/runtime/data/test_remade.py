"""What a replacement's script makes again is what the lost worker had, or somebody is told."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.completeness import Completeness
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import IncompleteStateError
from swift_ft.runtime.data.part import check_remade
from tests.unit.runtime.data.test_batch_check import Rendezvous


def start(rendezvous: Any, seed: int, *, mask: float = 1.0) -> None:
    """A worker with a frozen layer and a mask, of which only the adapter is in the state."""
    torch.manual_seed(seed)
    base, adapter = nn.Linear(3, 3).requires_grad_(requires_grad=False), nn.Linear(3, 3)
    base.register_buffer("mask", torch.full((3,), mask), persistent=False)
    completeness = Completeness(TrainingState({"adapter": adapter}))
    completeness.attach("the DDP model", nn.Sequential(base, adapter))
    check_remade(completeness, cast(Any, rendezvous), 3)


def test_the_same(caplog: pytest.LogCaptureFixture) -> None:
    rendezvous = Rendezvous()
    for _ in range(3):
        start(rendezvous, 1)
    assert not caplog.records


def test_another_frozen_parameter() -> None:
    rendezvous = Rendezvous()
    start(rendezvous, 1)
    with pytest.raises(IncompleteStateError, match=r"the DDP model's parameter '0\.weight' is frozen"):
        start(rendezvous, 2)


def test_another_buffer(caplog: pytest.LogCaptureFixture) -> None:
    rendezvous = Rendezvous()
    start(rendezvous, 1)
    start(rendezvous, 1, mask=2.0)
    assert [record.__dict__["event"] for record in caplog.records] == ["buffer_differs"]
