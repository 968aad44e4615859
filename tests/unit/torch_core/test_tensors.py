"""Conformance: the private parts of tensors and storages that `torch_core/tensors.py` uses."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch

from swift_ft.torch_core.tensors import (
    distinct_storages,
    same_bits,
    same_values,
    sparse_indices,
    sparse_values,
    storage_id,
    storage_names,
    version_of,
    versions_of,
)


def test_a_version_grows_with_each_change_in_place() -> None:
    tensor = torch.zeros(3)
    before = version_of(tensor)
    tensor.add_(1)
    tensor[0] = 2
    assert version_of(tensor) == before + 2
    assert version_of(tensor.detach()) == before + 2  # a view counts with its base
    assert tensor.sum() == 4
    assert version_of(tensor) == before + 2  # reading is no change


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
        tensor.add_(1)
    assert version_of(tensor) == 0


def test_versions_of_many_values() -> None:
    """Whatever an optimizer keeps beside tensors."""
    one, other = torch.zeros(3), torch.zeros(3)
    one.add_(1).mul_(2)
    assert versions_of([one, other]) == [version_of(one), 0]
    with torch.inference_mode():
        without = torch.zeros(3)
    assert versions_of([one, 3, None, without, [other]]) == [version_of(one), 0, 0, 0, 0]


def test_the_parts_of_a_sparse_tensor_keep_duplicates() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[1, 1, 0]]), torch.tensor([1.0, 2.0, 3.0]), (4,))
    assert sparse_indices(tensor).tolist() == [[1, 1, 0]]
    assert sparse_values(tensor).tolist() == [1.0, 2.0, 3.0]
    assert not tensor.is_coalesced()


def test_views_share_a_storage_and_empty_tensors_do_not() -> None:
    whole = torch.zeros(4)
    empty = [torch.empty(0), torch.empty(0)]
    storages = distinct_storages([whole, whole[1:], whole.view(2, 2), *empty])
    assert [storage.nbytes() for storage in storages] == [16, 0, 0]
    sparse = torch.eye(2).to_sparse()
    (values,) = distinct_storages([sparse, sparse_values(sparse)])
    assert values.nbytes() == 8


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.ones(2), torch.ones(2, 1), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.ones(2), 1.0, False),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
        (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse(), False),
        (torch.eye(2).to_sparse(), torch.eye(2), False),
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
        (1, True, False),
        ([1, (2, {"a": torch.ones(1)})], [1, (2, {"a": torch.ones(1)})], True),
        ([1, (2, {"a": torch.ones(1)})], [1, (2, {"a": torch.zeros(1)})], False),
        ([1], [1, 2], False),
        ([1], (1,), False),
        ({"a": 1}, {"b": 1}, False),
        (collections.OrderedDict(a=1), {"a": 1}, False),
    ],
    ids=str,
)
def test_values_are_compared_bit_for_bit(one: Any, other: Any, same: bool) -> None:
    assert same_values(one, other) is same
    assert same_values({"in": [one]}, {"in": [other]}) is same


@pytest.mark.filterwarnings("ignore:Sparse")
def test_compressed_sparse_tensors_are_compared_by_their_values() -> None:
    one = torch.eye(2).to_sparse_csr()
    assert same_values([one], [one.clone()])
    assert not same_values([one], [2 * one])


def test_values_that_cannot_be_compared_get_the_answer_that_was_asked_for() -> None:
    array = np.arange(2)
    for answer in (False, True):
        assert same_values([array], [array.copy()], incomparable=answer) is answer
        assert not same_values([array, 1], [array.copy(), 2], incomparable=answer)


def test_no_younger_storage_gets_a_number_that_is_held() -> None:
    """Otherwise the very next one of a kind does, as a rule."""
    first = torch.zeros(5)
    names = storage_names([first])
    (number,) = names
    assert storage_id(first) == number
    del first
    younger = [torch.zeros(5) for _ in range(100)]
    assert number not in map(storage_id, younger)
    names.clear()
    more = [torch.zeros(5) for _ in range(100)]
    assert number in map(storage_id, more), "its number is given again once it is not held"


def test_bits_wherever_they_begin_in_a_memory() -> None:
    """Eight bytes at once can only be compared where both begin at a multiple of eight."""
    whole = torch.arange(5.0)
    assert same_bits(whole[1:], whole[1:].clone())
    assert same_bits(torch.zeros(1).expand(4), torch.zeros(4))
    assert not same_bits(torch.zeros(1).expand(4), torch.tensor([0.0, 0.0, 0.0, -0.0]))
