"""Replicas whose loop is not the one that a session needs.

loops.py STORE HABIT
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft

STORE, HABIT = sys.argv[1:3]

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
store = f"{STORE}-{rank}" if HABIT == "a store for each rank" else STORE
session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=store, checkpoint_every=3)
session.attach_ddp(model)


def train_step(index: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * index + rank))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


if HABIT == "no steps":
    for index in range(6):
        train_step(index)
if HABIT == "counted":
    for number, step in enumerate(session.steps(4)):
        with step:
            train_step(number)
for _ in range(2 if HABIT == "epochs" else 1):
    for step in session.steps(4):
        with step:
            train_step(step.index)
dist.destroy_process_group()
