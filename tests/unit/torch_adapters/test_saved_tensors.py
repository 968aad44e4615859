"""A saved tensor is read straight into another one, or not at all."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swift_ft.torch_adapters.dcp.saved_tensors import read_into


def saved(tensor: Tensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file


PLAIN = [
    torch.randn(3, 4),
    torch.randn(5, dtype=torch.float64),
    torch.randn(7).bfloat16(),
    torch.randn(2, 3, dtype=torch.complex64),
    torch.arange(9),
    torch.tensor(3.5),
    torch.tensor([True, False]),
    torch.tensor([float("nan"), -0.0, float("inf")]),
    torch.randn(600_000),
]


@pytest.mark.parametrize("tensor", PLAIN, ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}")
@pytest.mark.parametrize("as_parameter", [False, True])
def test_the_bits_arrive(tensor: Tensor, as_parameter: bool) -> None:
    target = torch.zeros_like(tensor)
    can_learn = tensor.is_floating_point() or tensor.is_complex()
    file = saved(tensor.clone().requires_grad_() if as_parameter and can_learn else tensor)
    assert read_into(target, file)
    bits, wanted = (torch.atleast_1d(one).view(torch.uint8) for one in (target, tensor))
    assert torch.equal(bits, wanted)


OTHERS: dict[str, Callable[[], Tensor]] = {
    "another shape": lambda: torch.randn(4, 3),
    "another dtype": lambda: torch.randn(3, 4).double(),
    "transposed": lambda: torch.randn(4, 3).t(),
    "part of a storage": lambda: torch.randn(6, 4)[:3],
    "the end of a storage": lambda: torch.randn(6, 4)[3:],
    "conjugate": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.randn(3, 4).to_sparse(),
    "no storage of its dtype": lambda: torch.ones(3, 4, dtype=torch.uint16),
    "subclass": lambda: torch.nn.Parameter(torch.randn(3, 4)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_kind_is_left_alone(kind: str) -> None:
    tensor = OTHERS[kind]()
    dtype = tensor.dtype if kind in ("conjugate", "no storage of its dtype") else torch.float32
    target = torch.zeros(3, 4, dtype=dtype)
    assert not read_into(target, saved(tensor))
    assert not target.any()


@pytest.mark.parametrize("target", [torch.zeros(4, 3).t(), torch.zeros(6, 8)[::2, ::2]])
def test_a_target_that_is_not_contiguous_is_left_alone(target: Tensor) -> None:
    assert not read_into(target, saved(torch.ones(3, 4)))
    assert not target.any()


def test_files_that_torch_wrote_in_another_way() -> None:
    target = torch.zeros(3, 4)
    old = io.BytesIO()
    torch.save(torch.ones(3, 4), old, _use_new_zipfile_serialization=False)
    several = io.BytesIO()
    torch.save([torch.ones(3, 4)], several)
    for file in (old, several, io.BytesIO(b"nothing of that kind"), io.BytesIO()):
        assert not read_into(target, file)
    assert not target.any()


class Ends(io.BytesIO):
    """A file that is cut while it is read."""

    def readinto(self, memory: memoryview) -> int:  # type: ignore[override]
        return super().readinto(memory) if len(memory) < 4096 else 0


def test_a_file_that_ends_early_is_an_error() -> None:
    with pytest.raises(EOFError, match="the file ends 40000 bytes before its tensor does"):
        read_into(torch.zeros(10_000), Ends(saved(torch.ones(10_000)).getvalue()))
