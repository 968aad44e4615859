"""Replicas, by DDP or by FSDP2, whose script changes parameters outside of an optimizer's step.

parameters.py STORE HABIT [shards]
"""

import contextlib
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import swift_ft
from tests.support.habits import leave

STORE, HABIT = sys.argv[1:3]
SHARDS = sys.argv[3:] == ["shards"]
ITERATIONS = 8


class Contrast(nn.Module):
    """A query encoder that is trained, and a key encoder that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        self.key = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.data.copy_(q.data)
            k.requires_grad = False

    @torch.no_grad()
    def follow(self) -> None:
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            if HABIT == "momentum encoder, in place":
                k.mul_(0.9).add_(q, alpha=0.1)
            elif HABIT == "momentum encoder, by lerp on data":
                k.data.lerp_(q.data, 0.1)
            else:
                k.data = k.data * 0.9 + q.data * 0.1

    def forward(self, x: Tensor) -> Tensor:
        if HABIT.startswith("momentum encoder"):
            self.follow()
        with torch.no_grad():
            keys = self.key(x + 0.1)
        loss: Tensor = F.mse_loss(self.query(x), keys) + self.query(x).square().mean()
        return loss


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model: Any = Contrast()
if SHARDS:  # of which each replica has all
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
else:
    model = DistributedDataParallel(model)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer: torch.optim.Optimizer
if HABIT.startswith("SAM"):
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
else:
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
if "plain" not in HABIT:
    swift_ft.wrap_optimizer(optimizer)


def perturbed(scale: float) -> list[Tensor]:
    """The step of SAM uphill. Returns what the parameters were."""
    before = [p.data.clone() for p in trained]
    norm = torch.stack([p.grad.norm() for p in trained if p.grad is not None]).norm()
    for p in trained:
        assert p.grad is not None
        if HABIT == "SAM, on data":
            p.data.add_(p.grad * scale / norm)
        else:
            with torch.no_grad():
                p.add_(p.grad * scale / norm)
    return before


def train_step(index: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * index + rank))
    if HABIT == "weight noise":
        with torch.no_grad():
            for p in trained:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(index)), alpha=0.01)
    if HABIT == "shrink, each fifth step" and index % 5 == 4:
        for p in trained:
            p.data.mul_(0.5)
    if not HABIT.startswith("SAM"):
        model(x).backward()
    else:
        with model.no_sync() if HABIT == "SAM, no_sync" else contextlib.nullcontext():
            model(x).backward()
        before = perturbed(0.05)
        if HABIT != "SAM, no_sync":
            optimizer.zero_grad()
        model(x).backward()
        for p, old in zip(trained, before, strict=True):
            p.data = old
    optimizer.step()
    if HABIT == "clamp, in iteration 4 only" and index == 4:
        for p in trained:
            p.data.clamp_(-0.2, 0.2)
    if HABIT == "slow weights, each fifth step" and index % 5 == 4:
        for p, slow in zip(trained, slow_weights, strict=True):
            slow.lerp_(p.detach(), 0.5)
            p.data.copy_(slow)
    if HABIT == "clamp, in place":
        with torch.no_grad():
            for p in trained:
                p.clamp_(-0.2, 0.2)
    if HABIT == "clamp, on data" or (HABIT == "clamp, from iteration 2 on" and index >= 2):
        for p in trained:
            p.data.clamp_(-0.2, 0.2)
    if HABIT == "clip of one weight, by data":
        weight = trained[0]
        weight.data = weight.data * (0.5 / weight.data.norm()).clamp(max=1)
    optimizer.zero_grad()
    if HABIT in ("clamp, in iteration 4 only", "slow weights, each fifth step", "shrink, each fifth step"):
        dist.all_reduce(torch.zeros(1))  # of the loss, for a log


slow_weights = [p.detach().clone() for p in trained]
session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=STORE, checkpoint_every=3)
if SHARDS:
    session.attach_fsdp(model)
else:
    session.attach_ddp(model)
for step in session.steps(ITERATIONS):
    with step:
        train_step(step.index)

state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
leave(rank, tree_map_only(DTensor, DTensor.to_local, state))
dist.destroy_process_group()
