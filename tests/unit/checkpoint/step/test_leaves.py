"""Sparse tensors of a script go back, whatever has become of them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from swift_ft.checkpoint.step.leaves import Leaves


def added(tensor: torch.Tensor) -> None:
    tensor.add_(torch.ones(tensor.shape).to_sparse())


def grown(tensor: torch.Tensor) -> None:
    tensor.sparse_resize_((5, 3), 2, 0)


@pytest.mark.parametrize("change", [added, grown, torch.Tensor.zero_])
@pytest.mark.parametrize("inference", [False, True])
def test_a_sparse_tensor_goes_back(change: Callable[[torch.Tensor], object], inference: bool) -> None:
    with torch.inference_mode(inference):
        tensor = torch.eye(3).to_sparse()
        leaves = Leaves()
        leaves.add(tensor, sys.maxsize)
        change(tensor)
    for leaf in leaves:
        assert leaf.changed
        leaf.put_back()
    assert torch.equal(tensor.to_dense(), torch.eye(3))
