"""A large value that is as it was is not copied again, and is put back as if it were."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.leaves import EarlierCopies, Leaves
from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState

COUNT = 2**15
"""Elements of a value: of 128 KiB, as 4 bytes each."""


def tensor() -> torch.Tensor:
    return torch.arange(COUNT, dtype=torch.float32)


def array() -> np.ndarray:
    return np.arange(COUNT, dtype=np.float32)


def leaf_of(value: Any, copies: EarlierCopies) -> Any:
    """The leaf that a note would have of a value."""
    leaves = Leaves(None, copies)
    leaves.add(value, 2**20)
    return leaves.by_number[id(value)]


@pytest.mark.parametrize("make", [tensor, array])
def test_the_copy_of_a_value_that_is_as_it_was_is_shared(make: Callable[[], Any]) -> None:
    value, copies = make(), EarlierCopies()
    first = leaf_of(value, copies)
    assert leaf_of(value, copies) is first
    value[5] = -1.0
    second = leaf_of(value, copies)
    assert second is not first
    assert leaf_of(value, copies) is second
    second.put_back()
    assert value[5] == -1.0
    first.put_back()
    assert value[5] == 5.0
    second.put_back()
    assert value[5] == -1.0, "what one note puts back is not written into the copy of another one"


def through_data(value: torch.Tensor) -> None:
    value.data[7] = -0.0


def other_memory(value: torch.Tensor) -> None:
    value.data = value.data * 2


def by_numpy(value: torch.Tensor) -> None:
    value.numpy()[7] = 3.5


def another_shape(value: torch.Tensor) -> None:
    value.resize_(COUNT // 2)


@pytest.mark.parametrize("change", [through_data, other_memory, by_numpy, another_shape])
def test_each_way_to_change_a_tensor_is_seen(change: Callable[[torch.Tensor], None]) -> None:
    """Also those that no count of changes tells."""
    value, copies = tensor(), EarlierCopies()
    value[7] = 0.0
    first = leaf_of(value, copies)
    before = value.clone()
    change(value)
    after = value.clone()
    second = leaf_of(value, copies)
    assert second is not first
    first.put_back()
    assert torch.equal(value, before)
    second.put_back()
    assert torch.equal(value, after)
    assert value[7].item().hex() == after[7].item().hex(), "zeros of both signs are other bits"


def test_an_array_that_has_become_one_of_another_kind() -> None:
    """Its bytes are as they were."""
    value, copies = array(), EarlierCopies()
    first = leaf_of(value, copies)
    value.dtype = np.dtype(np.int32)
    second = leaf_of(value, copies)
    assert second is not first
    value[3] = 7
    second.put_back()
    assert value[3] == np.float32(3).view(np.int32)


def test_masks_are_copied_each_time() -> None:
    value, copies = np.ma.masked_array(array()), EarlierCopies()
    assert leaf_of(value, copies) is not leaf_of(value, copies)


@pytest.mark.parametrize("make", [tensor, array])
def test_what_no_note_has_any_more_is_held_by_nobody(make: Callable[[], Any]) -> None:
    copies = EarlierCopies()
    for _ in range(3):  # others may get its number
        value = make()
        first = leaf_of(value, copies)
        assert leaf_of(value, copies) is first
        del value, first
        gc.collect()
        copies.tidy()
        assert not copies._leaves


def test_small_values_are_copied_again() -> None:
    """To compare them would take longer."""
    value, copies = torch.zeros(16), EarlierCopies()
    assert leaf_of(value, copies) is not leaf_of(value, copies)


class Batches:
    """As a script keeps its data."""

    def __init__(self) -> None:
        self.text = tensor()


def test_two_steps_share_the_copy_of_a_text() -> None:
    batches = Batches()
    rollback = Rollback(TrainingState({"model": nn.Linear(1, 1)}))
    found = []
    for iteration in range(4):
        rollback.begin(iteration)
        assert rollback._now is not None
        found.append(rollback._now.variables.leaves[id(batches.text)])
    assert all(one is found[0] for one in found)
    batches.text[3] = -1.0
    rollback.back()
    assert batches.text[3] == 3.0
    rollback.begin(4)
    batches.text[3] = -2.0
    rollback.begin(5)
    batches.text[3] = -3.0
    rollback.back()
    assert batches.text[3] == -2.0
