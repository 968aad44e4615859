"""The example training on a mesh in which replicas of a stage have neighbouring ranks, on one machine."""

import torch
import train_hybrid
from torch.distributed.device_mesh import DeviceMesh


def together(device: str, shape: tuple[int, int], *, mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
    replicas, stages = shape
    ranks = torch.arange(replicas * stages).view(stages, replicas).T
    return DeviceMesh(device, ranks, mesh_dim_names=mesh_dim_names)


train_hybrid.init_device_mesh = together  # type: ignore[assignment]
train_hybrid.main()
