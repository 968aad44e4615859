"""Buffers that change their size as a model trains: observers of a quantization, banks of features.

Or that a forward pass makes, and that are None before.

sizes.py STORE HABIT ITERATIONS [pipeline]
"""

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.habits import attach, leave

STORE, HABIT, ITERATIONS = sys.argv[1], sys.argv[2], int(sys.argv[3])
PIPELINE = sys.argv[4:] == ["pipeline"]
MOST = 9


class Bank(nn.Module):
    """Remembers features of the last batches."""

    def __init__(self, begins_with: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.bank: torch.Tensor
        self.register_buffer("bank", torch.zeros(begins_with, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Moves away from what it remembers."""
        h = torch.tanh(self.layer(x))
        new = torch.cat([self.bank, h.detach()[:2]])[-MOST:]
        if HABIT == "grows in place":
            self.bank.resize_(new.shape).copy_(new)
        else:
            self.bank = new
        return torch.as_tensor(h - 0.1 * self.bank.mean(0))


class Centred(nn.Module):
    """Makes its buffers in the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.centre: torch.Tensor | None
        self.calls: torch.Tensor | None
        self.register_buffer("centre", None)
        self.register_buffer("calls", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Moves towards the centre of what it has seen."""
        h = torch.tanh(self.layer(x))
        now = h.detach().mean(0)
        if self.centre is None or self.calls is None:
            self.centre, self.calls = now, torch.zeros((), dtype=torch.int64)
        else:
            self.centre = 0.9 * self.centre + 0.1 * now
        self.calls += 1
        return torch.as_tensor(h - self.centre / self.calls)


def build() -> nn.Module:
    """A model of the habit."""
    if HABIT == "made":
        return nn.Sequential(Centred(), nn.Linear(6, 6))
    if HABIT != "quantized":
        return nn.Sequential(Bank(1 if HABIT == "grows from one" else 0), nn.Linear(6, 6))
    import torch.ao.quantization as quantization

    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).train()
    with warnings.catch_warnings(action="ignore"):
        net.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        prepared: nn.Module = quantization.prepare_qat(net)
    return prepared


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank if PIPELINE else 0)
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
replica = model if PIPELINE else DistributedDataParallel(model)
session = swift_ft.Session({"model": replica, "optimizer": optimizer}, store=STORE, checkpoint_every=3)
schedule: Any = attach(session, replica, pipeline=PIPELINE)
for step in session.steps(ITERATIONS):
    with step:
        generator = torch.Generator().manual_seed(step.index + (0 if PIPELINE else 100 * rank))
        x, y = torch.randn(2, 4, 6, generator=generator)
        optimizer.zero_grad()
        if schedule is None:
            (replica(x) - y).square().mean().backward()
        else:
            schedule.step(*[x] * (rank == 0), **({"target": y} if rank else {}))
        optimizer.step()
leave(rank, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
dist.destroy_process_group()
