"""The tag of a message counts where the backend of its group matches messages by it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_ft.torch_adapters.lasting_group import LastingGroup
from swift_ft.torch_adapters.script_operations import Operation

HOST, ELSEWHERE = torch.device("cpu"), torch.device("meta")


class Native:
    """A group of torch, as ``"cpu:gloo,cuda:nccl"`` makes it.

    Attributes:
        backends: their names, by device.
    """

    group_name, group_desc = "0", ""

    def __init__(self, backends: dict[torch.device, str]) -> None:
        self.backends = backends
        self._device_types = list(backends)

    def rank(self) -> int:
        """Of two."""
        return 0

    def size(self) -> int:
        """Two."""
        return 2

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: self.backends[device])


class Served:
    """An interceptor that lets no operation begin.

    Attributes:
        seen: all of them.
    """

    def __init__(self) -> None:
        self.seen: list[Operation] = []

    def begin_unseen(self, name: str, workers: int) -> None:
        """Each one is looked at."""

    def begin(self, operation: Operation) -> Callable[[], None] | None:
        """See the protocol."""
        self.seen.append(operation)
        return None


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(
    ("backends", "device", "expected"),
    [
        pytest.param({HOST: "gloo"}, HOST, 7, id="gloo"),
        pytest.param({HOST: "mpi"}, HOST, 7, id="mpi"),
        pytest.param({HOST: "nccl_like"}, HOST, 0, id="in the order of messages"),
        pytest.param({HOST: "gloo", ELSEWHERE: "nccl"}, HOST, 7, id="the first of two"),
        pytest.param({HOST: "gloo", ELSEWHERE: "nccl"}, ELSEWHERE, 0, id="the second of two"),
    ],
)
def test_a_tag_counts_by_the_backend(
    backends: dict[torch.device, str],
    device: torch.device,
    expected: int,
    ended: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a replay there may be no group beneath, and messages are served."""
    native: Any = Native(backends)
    group: Any = LastingGroup(native)
    interceptor = Served()
    monkeypatch.setattr(LastingGroup, "members", (0, 1))
    monkeypatch.setattr(LastingGroup, "interceptor", interceptor)
    if ended:
        group.end()
    tensors = [torch.zeros(1, device=device)]
    group.send(tensors, 1, 7)  # as torch calls it, also for each of a batch
    group.recv(tensors, 1, tag=7)
    group.recv(tensors, 1, 0)
    group.recv_anysource(tensors, 7)
    group.allreduce(tensors)
    assert [operation.tag for operation in interceptor.seen] == [expected, expected, 0, 0, 0]
