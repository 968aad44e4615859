"""One codec for state: what is packed comes back, and nothing that arrives is executed."""

from __future__ import annotations

import io
import os
import pickle
from typing import Any

import pytest
import torch

from swift_ft.checkpoint.state_payload import (
    StatePayload,
    TensorKind,
    fresh,
    kinds_in,
    pack,
    tensor_at,
    tensors_in,
    unpack,
)
from swift_ft.errors import TopologyMismatchError

NESTED = {
    "models": {"model": {"weight": torch.ones(2, 3), "bias": torch.zeros(3, dtype=torch.bfloat16)}},
    "optimizers": {"optimizer": {"state": {"0": {"step": torch.tensor(4.0)}}}},
    "plain": {"bytes": b"no tensor"},
}


def test_a_header_says_what_follows() -> None:
    payload = StatePayload(dict(tensors_in(NESTED)), b"plain")
    assert kinds_in(payload.header) == payload.kinds
    assert payload.kinds == {
        ("models", "model", "weight"): TensorKind(torch.float32, (2, 3)),
        ("models", "model", "bias"): TensorKind(torch.bfloat16, (3,)),
        ("optimizers", "optimizer", "state", "0", "step"): TensorKind(torch.float32, ()),
    }
    assert [kind.nbytes for kind in payload.kinds.values()] == [24, 6, 4]


def test_a_key_that_is_a_number() -> None:
    """As an optimizer may have them, of which some parameters are sent."""
    payload = StatePayload({("state", "0", 1): torch.zeros(2)})  # type: ignore[dict-item]
    assert kinds_in(payload.header) == payload.kinds


def test_a_header_is_the_one_of_before() -> None:
    """The bytes on the wire do not change."""
    payload = StatePayload({("a", "b"): torch.zeros(2, 0, dtype=torch.int64)}, b"123")
    assert payload.header == b'{"tensors": [[["a", "b"], "int64", [2, 0]]], "plain": 3}'


def test_tensors_are_found_by_their_paths() -> None:
    for path, tensor in tensors_in(NESTED):
        assert tensor_at(NESTED, path) is tensor


def test_a_tensor_of_which_this_process_knows_nothing() -> None:
    """As one that the script of a lost worker had renamed."""
    with pytest.raises(TopologyMismatchError, match=r"has models\.net\.weight_orig, and this process has"):
        tensor_at({"models": {"net": {"weight": torch.ones(1)}}}, ("models", "net", "weight_orig"))


def test_fresh_tensors_have_the_kinds_that_were_asked_for() -> None:
    kinds = StatePayload(dict(tensors_in(NESTED))).kinds
    assert StatePayload(fresh(kinds)).kinds == kinds


def test_plain_values_come_back() -> None:
    value: dict[Any, Any] = {1: {"lr": 0.5, "betas": (0.9, 0.99)}, "text": ["a", None], "t": torch.ones(2)}
    found = unpack(pack(value))
    assert torch.equal(found.pop("t"), value.pop("t"))
    assert found == value


class Forged:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.getcwd, ()


def test_what_arrives_is_not_executed() -> None:
    file = io.BytesIO()
    torch.save(Forged(), file)
    with pytest.raises(pickle.UnpicklingError, match=r"getcwd|[Uu]nsupported"):
        unpack(file.getvalue())
