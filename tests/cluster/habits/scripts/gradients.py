"""Replicas that zero gradients at different places, or not in each step.

gradients.py STORE HABIT
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.habits import leave

STORE, HABIT = sys.argv[1:3]
ITERATIONS = 8

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)


class Heads(nn.Module):
    """Two of them, which compute in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.heads = nn.ModuleList([nn.Linear(16, 2), nn.Linear(16, 2)])

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        head: torch.Tensor = self.heads[number](torch.tanh(self.body(x)))
        return head


IN_TURN = "heads in turn" in HABIT
plain = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
model = DistributedDataParallel(Heads() if IN_TURN else plain, find_unused_parameters=IN_TURN)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if "plain" not in HABIT:
    swift_ft.wrap_optimizer(optimizer)
session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=STORE, checkpoint_every=3)
session.attach_ddp(model)
for step in session.steps(ITERATIONS):
    with step:
        if HABIT == "delayed" and step.index:  # the update of the step before
            optimizer.step()
            optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step.index + rank))
        if HABIT.startswith("first line"):
            optimizer.zero_grad(set_to_none="set to zero" not in HABIT)
        loss = model(x, *((step.index % 2,) if IN_TURN else ())).square().mean()
        if HABIT == "after the forward":
            optimizer.zero_grad()
        if HABIT == "by hand":
            for parameter in model.parameters():
                parameter.grad = None
        loss.backward()
        if HABIT != "delayed":
            optimizer.step()
        if HABIT == "last line, set to zero" or (HABIT == "carried from iteration 5 on" and step.index < 5):
            optimizer.zero_grad(set_to_none=False)
        if HABIT == "every second step" and step.index % 2:
            optimizer.zero_grad()
        if HABIT == "one parameter is left out":
            for parameter in list(model.parameters())[1:]:
                parameter.grad = None

leave(rank, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
dist.destroy_process_group()
