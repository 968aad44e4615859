"""Replicas that have variables of their own: generators, means of losses, names of files.

own_variables.py STORE HABIT [sharded]
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import swift_ft
from tests.support.habits import leave

STORE, HABIT = sys.argv[1:3]
SHARDED = sys.argv[3:] == ["sharded"]
ITERATIONS = 9


class Augmented(nn.Module):
    """Adds noise to its input."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.noise = torch.Generator().manual_seed(rank)
        self.choices = np.random.default_rng(rank)
        self.last_loss = 0.0
        self.file = ""

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        if HABIT == "seeded in each step":
            self.noise.manual_seed(100 * index + self.rank)
        elif HABIT == "made anew in each step":
            self.choices = np.random.default_rng((index, self.rank))
        if HABIT in ("torch.Generator", "seeded in each step"):
            x = x + 0.1 * torch.randn(x.shape, generator=self.noise)
        elif HABIT in ("NumPy's generator", "made anew in each step"):
            x = x + float(self.choices.random())
        y: torch.Tensor = self.net(x)
        self.last_loss = float(y.detach().mean())
        self.file = f"{self.rank}-{index}.txt"
        return y


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
inner = Augmented(rank)
model: nn.Module = inner
if SHARDED:  # two replicas of two shards
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
else:
    model = DistributedDataParallel(model)
optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=STORE, checkpoint_every=5)
if SHARDED:
    session.attach_fsdp(model)
else:
    session.attach_ddp(model)
files = Path(STORE).with_name("files")
files.mkdir(exist_ok=True)
for step in session.steps(ITERATIONS):
    if inner.file:
        (files / f"{rank}.of").write_text(inner.file.partition("-")[0])
    with step:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step.index + rank))
        model(x, step.index).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

written = (files / f"{rank}.of").read_text()
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "file": written}
leave(rank, tree_map_only(DTensor, DTensor.to_local, state))
dist.destroy_process_group()
