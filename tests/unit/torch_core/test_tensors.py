"""Conformance: the private parts of tensors and storages that `torch_core/tensors.py` uses."""

from __future__ import annotations

import torch

from swift_ft.torch_core.tensors import (
    distinct_storages,
    same_bits,
    sparse_indices,
    sparse_values,
    storage_id,
    storage_names,
    version_of,
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
