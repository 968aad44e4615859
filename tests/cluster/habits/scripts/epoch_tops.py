"""Trains in epochs, each of which begins with lines that draw, decay, step a scheduler or change tensors.

    epoch_tops.py STORE nested|function HABITS [memory[-borders]|checkpoints[-borders]]

HABITS are joined by "+", or "all". With "memory", nothing is attached. With "-borders", a state that all may
return to is one from the beginning of an epoch. Where the test has made a file "fails", a step fails.
"""

import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.habits import leave

EPOCHS, STEPS = 4, 3
FORM, HABITS = sys.argv[2], sys.argv[3].split("+")
KIND = "".join(sys.argv[4:])
MEMORY = KIND.startswith("memory")

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
teacher = nn.Linear(8, 1)
model: Any = net if MEMORY else DistributedDataParallel(net)
trained = [*net.parameters()][: -1 if "group" in HABITS else None]
optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(trained, lr=0.05), exact=True)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "teacher": teacher}
if MEMORY:
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
options: dict[str, Any] = {
    "": {},
    "memory": {"snapshot_every": 2},
    "memory-borders": {"snapshot_every": STEPS},
    "checkpoints": {"checkpoint_every": 4},
    "checkpoints-borders": {"checkpoint_every": STEPS},
}
session = swift_ft.Session(state, store=sys.argv[1], **options[KIND])
if not MEMORY:
    session.attach_ddp(model)

rng = np.random.default_rng(0)
generator = torch.Generator().manual_seed(0)
tau, history = 1.0, list[Any]()


def has(habit: str) -> bool:
    return habit in HABITS or "all" in HABITS


def top() -> tuple[dict[str, float], torch.Tensor]:
    """The lines at the top of an epoch, and what they give to its steps."""
    global tau
    factors: dict[str, float] = {}
    order = torch.arange(8)
    if has("own draw"):
        factors["temperature"] = rng.uniform(0.5, 1.5)
    if has("permutation"):
        order = torch.randperm(8, generator=generator)
    if has("global draws"):
        factors["python"], factors["numpy"] = random.random(), np.random.rand()
        factors["torch"] = torch.rand(()).item()
    if has("tau"):
        factors["before"] = 1.1 - tau
        tau *= 0.9
        factors["tau"] = tau
    if has("scheduler"):
        factors["rate before"] = 1 + optimizer.param_groups[0]["lr"]
        scheduler.step()
    if has("rate"):
        optimizer.param_groups[0]["lr"] *= 0.9
    if has("decay"):
        optimizer.param_groups[0]["weight_decay"] += 0.01
    if "group" in HABITS and len(history) == 1:
        optimizer.add_param_group({"params": [net[2].bias], "lr": 0.02})
    if has("teacher"):
        teacher.load_state_dict(net[2].state_dict())
    if has("shrink"):
        with torch.no_grad():
            net[0].weight.mul_(0.9)
    if has("momentum"):
        optimizer.state.clear()
    if has("norm"):
        factors["norm"] = 1 + net[2].weight.detach().norm().item()
    return factors, order


def train(epoch: int, factors: dict[str, float], order: torch.Tensor) -> float:
    """The steps of an epoch, or the whole of it."""
    if FORM == "function":
        factors, order = top()
    depth = 1 + rng.uniform() if FORM == "function" and has("own draw") else 1.0
    mine = 1 + rank + epoch if has("rank") else 1  # of this replica's own
    total = 0.0
    for step in session.steps(STEPS):
        with step:
            if step.index == 7 and Path(os.environ["SWIFT_TEST_FOLDER"], "fails").exists():
                raise RuntimeError("as the test has asked for")
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step.index + rank))
            model.zero_grad()
            scale = depth * mine * float(np.prod([*factors.values()]))
            hidden = model(x[order])
            loss = scale * (hidden * torch.arange(8)[:, None]).square().mean()
            if has("teacher"):
                loss = loss + (hidden - teacher(net[0](x)).detach()).square().mean()
            loss.backward()
            value = loss.detach().clone()
            dist.all_reduce(value)
            optimizer.step()
            total += value.item()
    return total


for epoch in session.epochs(EPOCHS):
    factors, order = top() if FORM == "nested" else ({}, torch.arange(8))
    total = train(epoch, factors, order)
    history.append((epoch, total, tau, optimizer.param_groups[0]["lr"], sorted(factors.items())))

leave(
    rank,
    {
        "model": net.state_dict(),
        "teacher": teacher.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "tau": tau,
        "history": history,
        "rng": rng.bit_generator.state,
        "generator": generator.get_state(),
    },
)
