"""Replicas whose script registers hooks as it trains: hooks.py STORE HABIT."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

import swift_ft
from tests.support.habits import leave

STORE, HABIT = sys.argv[1:3]
ITERATIONS = 8


def halve(gradient: torch.Tensor) -> torch.Tensor:
    """As a mask or a clip."""
    return gradient * 0.5


def shift(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    """As one that replaces activations."""
    return output + 1.0


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
first, last = nn.Linear(6, 16), nn.Linear(16, 2)
net = nn.Sequential(first, nn.Tanh(), last)
model = DistributedDataParallel(net)
optimizer = swift_ft.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1e-1))
usual = last.register_forward_hook(shift)
session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=STORE, checkpoint_every=3)
session.attach_ddp(model)
for step in session.steps(ITERATIONS):
    if HABIT == "from step 3 on" and step.index == 3:
        first.weight.register_hook(halve)
    if HABIT == "until step 3" and step.index == 3:
        usual.remove()
    if HABIT == "pruned in step 2" and step.index == 2:
        prune.l1_unstructured(first, "weight", amount=0.5)
    with step:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step.index + rank))
        if HABIT == "within each step":
            handles = [first.register_forward_hook(shift), first.weight.register_hook(halve)]
        if HABIT == "removed within each step":
            usual.remove()
        model(x).square().mean().backward()
        if HABIT == "within each step":
            for handle in handles:
                handle.remove()
        if HABIT == "removed within each step":
            usual = last.register_forward_hook(shift)
        optimizer.step()
        optimizer.zero_grad()

leave(rank, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
dist.destroy_process_group()
