"""Replicas whose optimizer updates within the backward pass, and a script that changes something behind it.

updates_early.py STORE HABIT
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.habits import leave

STORE, HABIT = sys.argv[1:3]

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if HABIT not in ("a plain optimizer", "wrapped late"):
    swift_ft.wrap_optimizer(optimizer, wait_free=True, exact=True)
scaler = torch.amp.GradScaler("cpu", enabled="a scaler" in HABIT)
state = {"model": model, "optimizer": optimizer, "scaler": scaler}
session = swift_ft.Session(state, store=STORE, checkpoint_every=3)
session.attach_ddp(model)
if HABIT == "wrapped late":
    swift_ft.wrap_optimizer(optimizer, wait_free=True, exact=True)
for step in session.steps(6):
    with step:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step.index + rank))
        loss = model(x).square().mean() * (torch.inf if "skips" in HABIT else 1.0)
        scaler.scale(loss).backward()
        if HABIT == "clipping":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if HABIT == "a rate":
            optimizer.param_groups[0]["lr"] = 1e-2 / (step.index + 2)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.9

leave(rank, {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()})
dist.destroy_process_group()
