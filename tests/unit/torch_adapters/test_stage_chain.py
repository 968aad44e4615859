"""What cannot be computed apart is said before anything is sent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from swift_ft.errors import CannotHelpError
from swift_ft.torch_adapters.pipelining.microbatch import StageChain


def test_sparse_gradients_are_refused() -> None:
    module = nn.Embedding(8, 2, sparse=True)
    module(torch.tensor([1, 3])).sum().backward()
    chain = object.__new__(StageChain)
    chain.stages = {4: SimpleNamespace(submod=module)}  # type: ignore[dict-item]
    with pytest.raises(CannotHelpError, match="gradients of stage 4 are sparse"):
        chain.take_gradients(4)
