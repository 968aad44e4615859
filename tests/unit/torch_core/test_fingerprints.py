"""A fingerprint sees each way in which a tensor is written to, or exchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from swift_ft.torch_core.fingerprints import Sampler, _places
from swift_ft.torch_core.tensors import all_versions_of, version_of

CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda p: p.add_(1.0),
    "one element, in place": lambda p: p.view(-1)[5:6].add_(1.0),
    "through data": lambda p: p.data.mul_(1.5),
    "other data": lambda p: setattr(p, "data", p.data.clone()),
    "other data of other values": lambda p: setattr(p, "data", p.data * 2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@torch.no_grad()
def test_a_change(change: Callable[[torch.Tensor], object], dtype: torch.dtype) -> None:
    tensors = [torch.randn(shape).to(dtype) for shape in [(3,), (40, 7), (1000,)]]
    sampler = Sampler()
    before = sampler.take(tensors)
    assert sampler.take(tensors).differing(before) == []
    change(tensors[1])
    assert sampler.take(tensors).differing(before) == [1]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_a_change_between_looks_at_some_of_them(change: Callable[[torch.Tensor], object]) -> None:
    tensors = [torch.randn(shape) for shape in [(3,), (40, 7), (1000,), (2, 2)]]
    every = Sampler().take(tensors)
    some = [tensors[2], tensors[1]]
    assert Sampler().take(some).unlike(every) == set()
    assert every.moved([2, 1]) == []
    change(tensors[1])
    now = Sampler().take(some)
    assert now.unlike(every) == {tensors[1]}
    assert every.moved([2]) == []
    if now.versions[1] != every.versions[1] or now.places[1] != every.places[1]:
        assert every.moved([2, 1]) == [1]
    assert every.unlike(now) == {tensors[0], tensors[1], tensors[3]}, "nor were they noted"


@torch.no_grad()
def test_what_moved_is_known_without_reading_an_element() -> None:
    tensors = [torch.randn(3) for _ in range(4)]
    noted = Sampler().take(tensors)
    assert noted.moved() == []
    tensors[0].data.add_(1)  # only a sample tells
    tensors[1].add_(1)
    tensors[2].data = tensors[2].data.clone()
    assert noted.moved() == [1, 2]


@torch.no_grad()
def test_tensors_of_any_layout() -> None:
    base = torch.randn(8, 6)
    tensors = [base.t(), base[:, ::2], torch.zeros(0), torch.zeros(()), torch.randn(2, 3).to_sparse()]
    sampler = Sampler()
    before = sampler.take(tensors)
    base.data.mul_(3)
    assert sampler.take(tensors).differing(before) == [0, 1]


@torch.no_grad()
def test_bits_and_not_numbers_are_compared() -> None:
    tensor = torch.full((4,), float("nan"))
    sampler = Sampler()
    before = sampler.take([tensor])
    assert sampler.take([tensor]).differing(before) == []
    zero = torch.zeros(4)
    before = sampler.take([zero])
    zero.data.neg_()
    assert sampler.take([zero]).differing(before) == [0]


@pytest.mark.parametrize("odd", ["none", "sparse", "of inference", "without elements", "other"])
def test_many_tensors_at_once_are_as_each_by_itself(odd: str) -> None:
    class Other(torch.Tensor):
        """A script's own class."""

    tensors: list[torch.Tensor] = [torch.randn(3), nn.Parameter(torch.randn(2, 2))]
    if odd == "sparse":
        tensors.append(torch.eye(3).to_sparse())
    elif odd == "of inference":
        with torch.inference_mode():
            tensors.append(torch.ones(3))
    elif odd == "without elements":
        tensors.append(torch.zeros(0))
    elif odd == "other":
        tensors.append(torch.randn(3).as_subclass(Other))
    tensors[0].add_(1)
    assert _places(tensors) == [one.data_ptr() if one.layout == torch.strided else 0 for one in tensors]
    assert all_versions_of(tensors) == [version_of(one) for one in tensors]
    assert all_versions_of(tensors)[0] == 1


def test_plain_tensors_are_not_asked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step asks all parameters more than once."""
    asked: list[torch.Tensor] = []
    tensors = [nn.Parameter(torch.randn(3)) for _ in range(5)]
    sampler = Sampler()
    sampler.take(tensors)  # the first time it looks for where to look

    def one_by_one(tensor: torch.Tensor) -> int:
        asked.append(tensor)
        return 0

    monkeypatch.setattr("swift_ft.torch_core.tensors.version_of", one_by_one)
    monkeypatch.setattr("swift_ft.torch_core.fingerprints.local", one_by_one)
    assert sampler.take(tensors).moved() == []
    assert not asked


def test_a_sample_of_an_expanded_tensor_stays_in_its_memory() -> None:
    memory = torch.zeros(32)
    one = memory[:4].expand(1000, 4)
    before = Sampler().take([one])
    memory[4:] = 1
    assert not before.rewritten(Sampler().take([one]))
    memory[3] = 1
    assert before.rewritten(Sampler().take([one])) == {0}


def test_no_gap_of_a_small_tensor_is_read() -> None:
    """A column of a matrix whose other columns change."""
    matrix = torch.zeros(4, 8)
    sampler = Sampler()
    column = torch.from_numpy(matrix.numpy())[:, 0]  # which counts its own changes
    before = sampler.take([column])
    matrix[:, 1:] += 1
    assert [*sampler.take([column]).differing(before)] == []
    matrix[3, 0] = 1
    assert [*sampler.take([column]).differing(before)] == [0]
