"""How many samples microbatches have, over all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from swift_ft.errors import UsageError
from swift_ft.torch_adapters.pipelining.batch_sizes import check_sizes, sizes_of


def inputs(*sizes: int) -> list[Any]:
    """Arguments that are no tensors, or have no dimension, come before what is split."""
    return [("text", torch.ones(()), torch.ones(size, 7)) for size in sizes]


def targets(*sizes: int) -> list[Any]:
    return [torch.ones(size) for size in sizes]


def check(*workers: Sequence[int]) -> None:
    """As all workers do it together."""
    check_sizes([max(of_all) for of_all in zip(*workers, strict=True)], (3, 5))


def test_equally_many_on_all() -> None:
    """A first stage, one in the middle, and a last one, whose targets are of each token."""
    check(sizes_of(inputs(2, 2), None), sizes_of(None, None), sizes_of(None, targets(64, 64)))
    check(sizes_of([(), ()], targets(2, 2)))
    check(sizes_of(None, None))


@pytest.mark.parametrize(
    "workers",
    [
        (sizes_of(inputs(2, 2), None), sizes_of(inputs(2, 3), None)),
        (sizes_of(None, targets(2)), sizes_of(None, None), sizes_of(None, targets(3))),
        (sizes_of(inputs(2), targets(3)), sizes_of(inputs(2), targets(2))),
    ],
)
def test_others_on_one(workers: Sequence[Sequence[int]]) -> None:
    words = r"have 3, 5 microbatches, of 2 to 3 samples.*model\.counts"
    with pytest.raises(UsageError, match=words) as caught:
        check(*workers)
    assert caught.value.fields["alike"], "all workers say so: no machine is refused for it"
