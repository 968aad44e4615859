"""Replicas of which one keeps something, and begins to after the first steps: kept_by_one.py STORE HABIT.

Worker 0 evaluates, and keeps the best model; each worker has a folder for what it writes.
"""

import json
import sys
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.habits import leave

STORE, HABIT = sys.argv[1:3]
ITERATIONS = 10
ACCURACIES = [0.0, 0.0, 0.0, 0.0, 0.9, 0.5, 0.4, 0.6, 0.7, 0.8]
"""The fifth model is the best one: who has forgotten it takes a later one."""


class Keeper:
    """Keeps the names of the last good models."""

    def __init__(self) -> None:
        self.last: deque[str] = deque(maxlen=5)

    def look(self, index: int) -> None:
        if ACCURACIES[index] > 0.45:
            self.last.append(f"{index}.pt")


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 2))
optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=STORE, checkpoint_every=3)
session.attach_ddp(model)
keeps = 1 if HABIT == "by worker 1" else 0
best, bad, keeper = float("-inf"), 0, Keeper()
file = Path(STORE).with_name("best.json")
for step in session.steps(ITERATIONS):
    with step:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step.index + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == keeps and step.index >= 4:
        keeper.look(step.index)
        if ACCURACIES[step.index] > best:
            best, bad = ACCURACIES[step.index], 0
            file.write_text(json.dumps([step.index, best]))
        else:
            bad += 1

state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
leave(rank, {**state, "best": file.read_text(), "bad": bad, "last": [*keeper.last]})
dist.destroy_process_group()
