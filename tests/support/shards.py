"""Sharded tensors in one process: as one worker of a mesh has them, without the other workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def worker_of_mesh(rank: int = 1, replicas: int = 2, shards: int = 2) -> Iterator[DeviceMesh]:
    """As worker ``rank`` of a mesh of replicas and shards. Collectives return at once, with garbage."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=replicas * shards)
    try:
        # torch keeps meshes in caches and compares them by their ranks and names, not by who looks at them.
        names = (f"replicate{rank}", f"shard{rank}")
        yield init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def worker_of_cube(rank: int) -> Iterator[DeviceMesh]:
    """As worker ``rank`` of a mesh of three dimensions of two."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=(f"a{rank}", f"b{rank}", f"c{rank}"))
    finally:
        dist.destroy_process_group()


def sharded(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """The worker's shard of a tensor, along the first dimension."""
    _, number = mesh.get_coordinate() or (0, 0)
    pieces = list(whole.chunk(mesh.size(1)))
    pieces += [whole[:0]] * (mesh.size(1) - len(pieces))
    return DTensor.from_local(
        pieces[number].clone(),
        mesh,
        [Replicate(), Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
