"""An abort waits for each call of ours that gives an operation to NCCL: torch would leave it spinning."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swift_ft.runtime.replicas.transfer import Link
from swift_ft.torch_adapters.abortable_waits import AbortableWaits
from swift_ft.torch_adapters.ddp_buffers import BufferSync
from swift_ft.torch_adapters.lasting_group import LastingGroup, beginning
from swift_ft.torch_adapters.lasting_work import LastingWork
from swift_ft.torch_adapters.layer_stack import LayerStack
from swift_ft.torch_adapters.pipelining import layer_averages
from swift_ft.torch_adapters.pipelining.layer_averages import LayerAverages

pytestmark = pytest.mark.usefixtures("one_process")

Held = list[bool]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> AbortableWaits:
    waits = AbortableWaits()
    waits.silent = True
    monkeypatch.setattr(LastingWork, "waits", waits)
    return waits


@pytest.fixture
def held(waits: AbortableWaits, monkeypatch: pytest.MonkeyPatch) -> Held:
    """Whether an abort would wait, by operation."""
    held: Held = []

    def operation(*_: Any, **__: Any) -> Any:
        held.append(not waits.beginnings.over(0))
        return SimpleNamespace(wait=lambda: None)

    for name in ("broadcast", "isend", "irecv", "all_reduce"):
        monkeypatch.setattr(dist, name, operation)
    monkeypatch.setattr(layer_averages, "begin", lambda operations: [operation() for _ in operations])
    return held


class Native:
    """A group of torch with another member."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def _carry(source: int, target: int | None) -> None:
    group: Any = Native()
    Link(group, source, target).carry(torch.ones(2))


def _share_buffers() -> None:
    group: Any = Native()
    assert BufferSync(DistributedDataParallel(nn.BatchNorm1d(2))).begin(group) is not None


def _send_sums() -> None:
    stack = LayerStack(lambda _: nn.Linear(3, 3), 1)
    averages = LayerAverages(stack, stack.begun, (1,), scale=True)
    averages._operations = lambda *_: iter([None])  # type: ignore[method-assign, assignment]  # to another one
    averages._begin_layer(0, stack.layer(0))


def _wait_for_all() -> None:
    stack = LayerStack(lambda _: nn.Linear(3, 3), 1)
    LayerAverages(stack, stack.begun, (1,), scale=True)._wait_for_all()


CALLS: dict[str, Callable[[], object]] = {
    "a state that is sent": lambda: _carry(0, 1),
    "a state that is received": lambda: _carry(1, 0),
    "a state for all": lambda: _carry(0, None),
    "buffers of a DDP model": _share_buffers,
    "sums of a layer": _send_sums,
    "averages of all": _wait_for_all,
}


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_an_abort_waits_for_it(call: Callable[[], object], waits: AbortableWaits, held: Held) -> None:
    call()
    assert held == [True]
    assert waits.beginnings.over(0)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_after_an_abort_it_does_not_begin(
    call: Callable[[], object], waits: AbortableWaits, held: Held
) -> None:
    waits.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        call()
    assert held == []


class OfOne:
    """As a group of torch's."""

    group_name, group_desc = "0", ""
    _device_types = ()

    def rank(self) -> int:
        """Its only member."""
        return 0

    def size(self) -> int:
        """One member."""
        return 1


def test_a_group_of_the_script_surrounds_its_own(waits: AbortableWaits) -> None:
    """Before that its members meet, which may take long, and an abort must not wait for it."""
    with beginning(LastingGroup(OfOne())):  # type: ignore[arg-type]
        assert waits.beginnings.over(0)
