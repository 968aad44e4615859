"""Copies in a worker's memory, as it offers them to a next world."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_ft.checkpoint.memory_copy import Block, digest_of
from swift_ft.errors import RecoveryError
from swift_ft.runtime.memory.holder import Held
from swift_ft.runtime.memory.memory_checkpoints import MemoryCheckpoints

OWN, OTHER, AT = 0, 1, 10


def a_copy() -> Held:
    block = Block(torch.arange(100, dtype=torch.uint8), 90)
    return Held(block, digest_of(block))


@pytest.fixture
def copies() -> MemoryCheckpoints:
    """Of worker 0, which has one of its own, and one of worker 1."""
    context: Any = SimpleNamespace(rank=OWN, world_size=2, workers_per_machine=1)
    nothing: Any = None
    made = MemoryCheckpoints(context, nothing, nothing, nothing, None)
    made._own[AT] = a_copy()
    made._held._copies[AT], made._held._owner = a_copy(), OTHER
    return made


def test_each_copy_is_found_by_its_owner(copies: MemoryCheckpoints) -> None:
    held, own = copies._held._copies[AT], copies._own[AT]
    assert isinstance(own, Held)
    assert copies.copy_of(OWN, AT) is own.block
    assert copies.copy_of(OTHER, AT) is held.block


def test_a_copy_whose_digest_nobody_has_computed_yet(copies: MemoryCheckpoints) -> None:
    copies._own[AT] = block = a_copy().block
    assert copies.copy_of(OWN, AT) is block


@pytest.mark.parametrize(("rank", "iteration"), [(OWN, 9), (OTHER, 9), (2, AT)])
def test_one_that_is_gone(rank: int, iteration: int, copies: MemoryCheckpoints) -> None:
    with pytest.raises(RecoveryError, match=f"worker {rank}'s state at iteration {iteration} is gone"):
        copies.copy_of(rank, iteration)


@pytest.mark.parametrize("rank", [OWN, OTHER])
def test_a_damaged_one_is_dropped_and_not_reported_again(rank: int, copies: MemoryCheckpoints) -> None:
    copies.copy_of(rank, AT).data[50] ^= 1
    with pytest.raises(RecoveryError, match="the copy of iteration 10 in memory is not what was"):
        copies.copy_of(rank, AT)
    kept, held, _ = copies.report()
    assert (kept, held) == (((), (AT,)) if rank == OWN else ((AT,), ()))
