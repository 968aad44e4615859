"""The example training on a mesh in which replicas of a stage have neighbouring ranks, on one machine."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import torch
import train_hybrid
from torch.distributed.device_mesh import DeviceMesh


def together(device: str, shape: tuple[int, int], *, mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
    replicas, stages = shape
    ranks = torch.arange(replicas * stages).view(stages, replicas).T
    return DeviceMesh(device, ranks, mesh_dim_names=mesh_dim_names)


train_hybrid.init_device_mesh = together  # type: ignore[assignment]
train_hybrid.main()
