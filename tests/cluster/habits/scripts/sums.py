"""Replicas that add up losses in each epoch: each its own, and the mean of all of them.

sums.py STORE
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.habits import leave

STORE = sys.argv[1]
STEPS, EPOCHS = 6, 3


class AverageMeter:
    """As in torch's examples."""

    def __init__(self) -> None:
        self.val = self.sum = self.avg = 0.0
        self.count = 0

    def update(self, val: float) -> None:
        self.val = val
        self.sum += val
        self.count += 1
        self.avg = self.sum / self.count


def train_one_epoch(session: swift_ft.Session, model: nn.Module, optimizer: Any) -> list[float]:
    """Returns the means of all replicas."""
    total, alike, count = 0.0, 0.0, 0
    own, meter = AverageMeter(), AverageMeter()
    for step in session.steps(STEPS):
        with step:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step.index + dist.get_rank()))
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            own.update(loss.item())
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            alike += mean.item()
            meter.update(mean.item())
            count += 1
    print(f"own means: {total / count} {own.avg}", flush=True)
    return [alike / count, meter.avg]


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 2))
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), exact=True)
    session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=STORE, checkpoint_every=6)
    session.attach_ddp(model)
    means = []
    for _ in session.epochs(EPOCHS):
        means.append(train_one_epoch(session, model, optimizer))
    leave(dist.get_rank(), {"model": model.state_dict(), "means": means})
    dist.destroy_process_group()


main()
