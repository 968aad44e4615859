"""Communicators form beforehand on GPUs, also those of groups that take tensors of the host over gloo."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_ft.torch_adapters import transports
from swift_ft.torch_adapters.directed_group import DirectedGroup

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class TwoBackends:
    """A group of two backends: ``init_process_group()`` makes one, and ``"cpu:gloo,cuda:nccl"``.

    Attributes:
        seen: its operations, with the devices of their tensors.
    """

    group_name = "0"
    _device_types = (CPU, CUDA)

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: "gloo" if device == CPU else "nccl")

    def _operation(self, name: str, tensors: list[Any]) -> Any:
        self.seen.append((name, tensors[0].device.type))
        return SimpleNamespace(wait=lambda: None)

    def allreduce(self, tensors: list[Any]) -> Any:
        return self._operation("allreduce", tensors)

    def send(self, tensors: list[Any], *_: int) -> Any:
        return self._operation("send", tensors)

    def recv(self, tensors: list[Any], *_: int) -> Any:
        return self._operation("recv", tensors)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that say that they are there."""

    def made(_: int, device: torch.device) -> Any:
        return SimpleNamespace(device=device, item=lambda: 1.0)

    monkeypatch.setattr(torch, "ones", made)
    monkeypatch.setattr(torch, "zeros", made)


def test_the_communicator_of_a_group() -> None:
    group: Any = TwoBackends()
    transports._first_collective(group)
    assert group.seen == [("allreduce", "cuda")]


def test_those_of_a_pair() -> None:
    native, formed = TwoBackends(), list[TwoBackends]()

    def form(*_: Any) -> Any:
        formed.append(TwoBackends())
        return formed[-1]

    given: Any = native
    DirectedGroup(given, (0, 1), form, lambda _: None).meet({1})
    assert [group.seen for group in formed] == [[("send", "cuda")], [("recv", "cuda")]]
