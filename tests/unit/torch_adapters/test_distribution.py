"""How a worker comes to its part of a distributed tensor, while the other workers are busy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from swift_ft.torch_adapters.distribution import communicate_again, distribute_within

OF_TORCH = [vars(kind)["_shard_tensor"] for kind in (Shard, _StridedShard)]
OF_TORCH += [vars(Replicate)["_make_replicate_tensor"]]


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """Of two workers. The other one never comes."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=1, world_size=2)
    distribute_within(nullcontext, alone=True)
    yield DeviceMesh("cpu", [0, 1], _init_backend=False)
    communicate_again()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("placement", "part"),
    [(Shard(0), [2.0, 3.0]), (Replicate(), [0.0, 1.0, 2.0, 3.0]), (_StridedShard(0, split_factor=2), [1, 3])],
)
def test_a_tensor_is_distributed_alone(placement: Placement, part: list[float], mesh: DeviceMesh) -> None:
    made = distribute_tensor(torch.arange(4.0), mesh, [placement])
    assert made.to_local().tolist() == part


def test_modules_are_parallelized_alone(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    whole = [parameter.detach().clone() for parameter in model.parameters()]
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    expected = [whole[0][2:], whole[1][2:], whole[2][:, 2:], whole[3]]
    assert all(torch.equal(one, other) for one, other in zip(parts, expected, strict=True))


def test_afterwards_torchs_own_methods_are_back(mesh: DeviceMesh) -> None:
    assert [vars(kind)["_shard_tensor"] for kind in (Shard, _StridedShard)] != OF_TORCH[:2]
    communicate_again()
    again = [vars(kind)["_shard_tensor"] for kind in (Shard, _StridedShard)]
    assert [*again, vars(Replicate)["_make_replicate_tensor"]] == OF_TORCH
