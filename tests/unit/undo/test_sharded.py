"""FSDP2: parameters, gradients and state are shards of one tensor (§4 works on what a worker has)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tools import set_grads
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from swift_ft import wrap_optimizer
from swift_ft.optim import Lamb


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Muon, Lamb])
def test_a_shard_is_taken_back(mesh: Any, kind: type[Optimizer], exact: bool) -> None:
    whole = torch.linspace(-1, 1, 35).view(5, 7)
    param = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    wrapped = wrap_optimizer(kind([param], lr=0.01), exact=exact)  # type: ignore[call-arg]  # all of them have
    for seed in range(3):
        plain = torch.empty(5, 7)
        set_grads([plain], seed)
        assert plain.grad is not None
        param.grad = distribute_tensor(plain.grad, mesh, [Shard(0)])
        before = param.detach().clone()
        wrapped.step()
        assert wrapped.undo() == 1
        assert isinstance(param, DTensor)
        rounding: dict[str, Any] = {} if not exact else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(param.to_local(), before.to_local(), **rounding)
        wrapped.step()
