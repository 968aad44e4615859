"""States compared bit for bit."""

from __future__ import annotations

import dataclasses
import io
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch

from swift_ft.checkpoint.plain_classes import KnownClasses
from swift_ft.checkpoint.state_digest import STORED_AS
from swift_ft.checkpoint.state_payload import pack
from swift_ft.offline.part_comparison import differences


@dataclasses.dataclass
class Averages:
    weights: torch.Tensor


def state(weight: torch.Tensor, **plain: object) -> dict[str, object]:
    packed = pack(plain, KnownClasses([Averages]))
    return {"models.model.weight": weight, "plain.bytes": io.BytesIO(packed)}


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), False),
        (torch.tensor(1.0), torch.tensor(1.0), True),
        (torch.tensor([], dtype=torch.bfloat16), torch.tensor([], dtype=torch.bfloat16), True),
    ],
)
def test_tensors(one: torch.Tensor, other: torch.Tensor, equal: bool) -> None:
    assert differences(state(one), state(other)) == ([] if equal else ["models.model.weight"])


def test_plain_values_by_their_path() -> None:
    weight = torch.ones(2)
    one, other = (
        state(weight, optimizers={"adam": {"param_groups": [{"lr": rate}]}}, **{STORED_AS: {"w": rate}})
        for rate in (0.1, 0.2)
    )
    assert differences(one, other) == ["plain.bytes.optimizers.adam.param_groups.0.lr"]
    assert differences(state(weight, a=1), state(weight, a=True)) == ["plain.bytes.a"]
    assert differences(state(weight, a={}, b=1), state(weight, b=1)) == ["plain.bytes.a"]


def test_values_of_numpy_and_of_containers() -> None:
    weight, nan = torch.ones(2), np.array([np.nan, 1.0])
    one = state(weight, a=nan, d=deque([1, np.int64(2)]), s={"x", "y", 3}, p=Path("a"))
    other = state(weight, a=nan.copy(), d=deque([1, np.int64(2)]), s={3, "y", "x"}, p=Path("a"))
    assert differences(one, other) == []
    other = state(weight, a=-nan, d=deque([1, 2]), s={"x", "y"}, p="a")
    assert differences(one, other) == [f"plain.bytes.{name}" for name in ("a", "d.1", "p", "s")]


def test_what_an_object_holds_is_compared_whole() -> None:
    """repr() leaves out what is in the middle of a large tensor."""
    one, other = torch.zeros(100_000), torch.zeros(100_000)
    other[50_000] = 1.0
    weight = torch.ones(2)
    assert differences(state(weight, a=Averages(one)), state(weight, a=Averages(one.clone()))) == []
    found = differences(state(weight, a=Averages(one)), state(weight, a=Averages(other)))
    assert found == ["plain.bytes.a.weights"]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_compared() -> None:
    one, other = (state(torch.ones(2), a=(size * torch.eye(3)).to_sparse()) for size in (1, 2))
    assert differences(one, one) == []
    assert differences(one, other) == ["plain.bytes.a"]


def test_the_random_numbers_of_a_replica_are_its_own() -> None:
    weight = torch.ones(2)
    one, other = (state(weight, small={"random": {"python": n}, "parts": {"x": 1}}) for n in (1, 2))
    assert differences(one, other) == ["plain.bytes.small.random.python"]
    assert differences(one, other, of_replica=True) == []


def test_what_was_there_before_the_lines_at_the_top_of_an_epoch_is_left_out() -> None:
    """It holds variables of the script, which may be times and paths."""
    one, other = (
        state(torch.ones(2), small={"parts": {"swift_ft.epochs": {"number": 1, "top": top}}})
        for top in (b"one", b"other")
    )
    assert differences(one, other) == []


def test_the_name_of_the_run_is_left_out_and_its_end_is_compared() -> None:
    one, other, ended = (
        state(torch.ones(2), run=run, small={"parts": {"swift_ft.stop": {"at": at, "run": run}}})
        for run, at in (("one", None), ("other", None), ("one", 8))
    )
    assert differences(one, other) == []
    assert differences(one, ended) == ["plain.bytes.small.parts.swift_ft.stop.at"]
