"""Replicas, or the stages of a pipeline, whose script changes flags and structure at iteration 2.

flags.py STORE HABIT [pipeline]
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.cluster.habits.scripts.flags_from import Phase, Window
from tests.support.habits import attach, leave

STORE, HABIT = sys.argv[1:3]
PIPELINE = sys.argv[3:] == ["pipeline"]
ITERATIONS, FROM = 8, 2
FEW_FIRST = ["another group", "as many other parameters"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(12, 6)
        self.temperature = 1.0
        self.phases = [Phase.EASY]
        self.window = Window([1.0], "first")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.drop(self.norm(self.backbone(x)).tanh()))
        y = y * (2 if self.phases[-1] is Phase.HARD else 1) * self.window.scales[0]
        return y / self.temperature


def batch(index: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * index + (0 if PIPELINE else rank)))


def change(net: Net, optimizer: torch.optim.Optimizer) -> None:
    if HABIT == "unfreezing":
        net.backbone.requires_grad_(True)
    elif HABIT == "evaluation mode of a layer":
        net.norm.eval()
    elif HABIT == "a dropout's p":
        net.drop.p = 0.1
    elif HABIT == "another group":
        optimizer.add_param_group({"params": net.backbone.parameters(), "lr": 1e-3})
    elif HABIT == "as many other parameters":
        optimizer.state.clear()
        group["params"] = [*net.backbone.parameters()]
    elif HABIT == "an attribute":
        net.temperature = 2.0
    elif HABIT == "an enum of another file":
        net.phases.append(Phase.HARD)
    elif HABIT == "a named tuple":
        net.window = Window([2.0], "second")
    elif HABIT == "a group that the script holds":
        group["lr"] = 1e-3


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank if PIPELINE else 0)
net = Net()
unfreezes = HABIT == "unfreezing"  # DDP would wait for the gradients of what is frozen after it was made
model: nn.Module = net if PIPELINE else DistributedDataParallel(net, find_unused_parameters=unfreezes)
if unfreezes:
    net.backbone.requires_grad_(False)
trained = net.head.parameters() if HABIT in FEW_FIRST else net.parameters()
optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(trained, lr=1e-2))
group = optimizer.param_groups[0]
session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=STORE, checkpoint_every=3)
schedule = attach(session, model, pipeline=PIPELINE)
for step in session.steps(ITERATIONS):
    if step.index == FROM:
        change(net, optimizer)
    with step:
        x = batch(step.index)
        if PIPELINE:
            schedule.step(*[x] if rank == 0 else [], target=x)
        else:
            model(x).square().mean().backward()
        optimizer.step()
        model.zero_grad()

flags = {name: p.requires_grad for name, p in net.named_parameters()}
modes = {name: module.training for name, module in net.named_modules()}
rest: dict[str, Any] = {"flags": flags, "modes": modes, "p": net.drop.p, "temperature": net.temperature}
rest |= {"phases": [*map(str, net.phases)], "window": net.window.name}
leave(rank, {"model": net.state_dict(), "optimizer": optimizer.state_dict(), **rest})
dist.destroy_process_group()
