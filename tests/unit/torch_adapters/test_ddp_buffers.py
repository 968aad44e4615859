"""When DDP synchronises buffers, and that they travel with the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swift_ft.torch_adapters.ddp_buffers import BufferSync
from swift_ft.torch_adapters.versions.buffer_sync import BUFFER_SYNC
from swift_ft.torch_core import outputs
from swift_ft.torch_core.outputs import Output

pytestmark = pytest.mark.usefixtures("one_process")


def model(*, keeps_equal: bool = True) -> DistributedDataParallel:
    given: dict[str, Any] = {BUFFER_SYNC: keeps_equal}
    return DistributedDataParallel(nn.BatchNorm1d(2), **given)


def test_ddp_synchronises_after_an_averaged_pass_only() -> None:
    replica = model()
    sync = BufferSync(replica)
    assert sync.due
    with replica.no_sync():
        replica(torch.ones(2, 2))
    assert not sync.due
    replica(torch.ones(2, 2))
    assert sync.due
    assert replica.parameters_to_ignore == set()


def test_one_replica_sends_nothing() -> None:
    replica = model()
    sync = BufferSync(replica)
    assert sync.begin(replica.process_group) is None
    sync.adopt()


class Two:
    """A group that says that it has two members."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


def test_the_second_replica_adopts_what_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of all dtypes lie in one tensor, the longest elements first."""
    theirs = nn.BatchNorm1d(2)
    theirs.register_buffer("flags", torch.tensor([True, False, True]))
    theirs.register_buffer("scale", torch.tensor(1.5, dtype=torch.bfloat16))
    ours = nn.BatchNorm1d(2)
    ours.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
    ours.register_buffer("scale", torch.tensor(0.0, dtype=torch.bfloat16))
    theirs(torch.randn(4, 2))
    buffers = sorted(theirs.buffers(), key=lambda buffer: -buffer.element_size())
    sent = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in buffers])

    class Arrived:
        def wait(self) -> None:
            pass

    def broadcast(flat: torch.Tensor, **_: object) -> Arrived:
        flat.copy_(sent)
        return Arrived()

    monkeypatch.setattr(dist, "broadcast", broadcast)
    sync = BufferSync(DistributedDataParallel(ours))
    sync.begin(Two())  # type: ignore[arg-type]
    assert sync.equal
    shown: list[Output] = []
    outputs.listen("test", shown.append)
    sync.adopt()
    outputs.listen("test", None)
    (got,) = shown
    assert got.received, "whoever verifies the step sees that they are the first replica's"
    assert torch.equal(got.tensors["buffers"], sent)
    assert all(a.equal(b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))


@pytest.mark.parametrize("own", ["argument", "no_sync"])
def test_replicas_with_buffers_of_their_own_send_nothing(own: str) -> None:
    replica = model(keeps_equal=own != "argument")
    if own == "no_sync":
        with replica.no_sync():
            replica(torch.ones(2, 2))
    sync = BufferSync(replica)
    assert sync.begin(Two()) is None  # type: ignore[arg-type]
    assert not sync.equal
