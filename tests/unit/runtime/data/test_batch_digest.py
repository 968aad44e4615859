"""Batches that differ have different digests, whatever they are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from swift_ft.runtime.data.digest import BatchDigest, reduce_on_device

LARGE = torch.arange(3_000_017, dtype=torch.uint8)


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


def digest(value: Any) -> str:
    return BatchDigest(value).value


SMALL = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "value",
    [
        SMALL,
        SMALL.T,
        SMALL.bfloat16(),
        SMALL.to(torch.complex64).conj(),
        torch.tensor(3),
        torch.zeros(0, 3),
        LARGE,
        LARGE[::2],
        {"x": SMALL, "mask": [None, torch.ones(3, dtype=torch.bool)], "length": 3},
        Batch(SMALL, SMALL),
        torch.nn.Parameter(SMALL.clone()),
    ],
)
def test_equal_batches(value: Any) -> None:
    before = torch.get_rng_state()
    assert digest(value) == digest(value)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (SMALL, SMALL + 1),
        (SMALL, SMALL.double()),
        (SMALL, SMALL.reshape(6, 4)),
        (SMALL, SMALL.flip(0)),
        ([SMALL, SMALL[:1]], [SMALL[:1], SMALL]),
        ({"x": SMALL}, {"y": SMALL}),
        ({"x": SMALL, "n": 1}, {"x": SMALL, "n": 2}),
        (Batch(SMALL, SMALL), Batch(SMALL, SMALL + 1)),
        (LARGE, LARGE.roll(1)),
        (LARGE, LARGE[:-1]),
    ],
)
def test_different_batches(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


def test_nothing_to_compare() -> None:
    assert BatchDigest((None, [{}, {}], {"training": True})).empty
    assert not BatchDigest([SMALL]).empty


@pytest.mark.parametrize("value", [SMALL, LARGE, LARGE[::2], torch.tensor(True)])
def test_the_number_that_a_device_computes(value: torch.Tensor) -> None:
    """It depends on the place of each byte, and at both ends of a large tensor."""
    number = reduce_on_device(value)
    assert number.dtype == torch.int64
    assert torch.equal(number, reduce_on_device(value.clone()))
    for place in (0, -1):
        changed = value.clone()
        changed.view(-1)[place] = 1 - changed.view(-1)[place].to(torch.int64)
        assert not torch.equal(number, reduce_on_device(changed))
    if value.numel() > 1:
        assert not torch.equal(number, reduce_on_device(value.flip(0)))
