"""Replicas whose loss depends on values that a script holds by itself: holds_values.py STORE HABIT."""

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.habits import leave

STORE, HABIT = sys.argv[1:3]
ITERATIONS = 8
HELD = 6000
"""Rows of a queue of 144 kB."""
LARGE = 2**24 + 1
"""Elements of a tensor that is too large to travel."""


class Statistics:
    """A running mean under two names, as a list of all that is saved or reduced."""

    def __init__(self) -> None:
        self.mean, self.var = torch.zeros(1), torch.ones(1)
        self.all = [self.mean, self.var]

    def change(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.square().mean(), 0.1)
        return self.all[0]


class Average:
    """An average of weights, as guided-diffusion has it."""

    def __init__(self, net: nn.Module) -> None:
        self.weights = [copy.deepcopy(list(net.parameters()))]

    @torch.no_grad()
    def change(self, net: nn.Module) -> Tensor:
        for ours, theirs in zip(self.weights[0], net.parameters(), strict=True):
            ours.detach().mul_(0.5).add_(theirs, alpha=0.5)
        return sum((one.square().sum() for one in self.weights[0]), torch.zeros(()))


class Momentum:
    """An optimizer's part of the script's own."""

    def __init__(self) -> None:
        self.velocity: dict[nn.Parameter, Tensor] = {}
        self.steps: dict[int, int] = {}

    @torch.no_grad()
    def change(self, net: nn.Module) -> None:
        for p in net.parameters():
            if p not in self.velocity:
                self.velocity[p] = torch.zeros_like(p)
            assert p.grad is not None
            self.velocity[p].mul_(0.9).add_(p.grad)
            self.steps[id(p)] = self.steps.get(id(p), 0) + 1
            p.grad.copy_(self.velocity[p] / self.steps[id(p)])


class Table:
    """What is too large to travel: it can only be named."""

    def __init__(self) -> None:
        self.average = {"weight": torch.zeros(LARGE if HABIT == "a large average" else 1)}

    def change(self) -> None:
        self.average["weight"] = 0.9 * self.average["weight"] + 0.1


def main() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
    vars(net)["table"] = torch.zeros(LARGE if HABIT == "a large attribute" else 1)
    model = DistributedDataParallel(net)
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    statistics, average, momentum, table = Statistics(), Average(net), Momentum(), Table()
    losses = [0.0] * 50_000  # an average for each sample
    queue, ring, filled = torch.zeros(HELD, 6), torch.zeros(HELD, 6), 0
    session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=STORE, checkpoint_every=3)
    session.attach_ddp(model)
    for step in session.steps(ITERATIONS):
        with step:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step.index))
            factor: Any = 1
            if HABIT == "one tensor in two places":
                factor = 1 + statistics.change(x)
            elif HABIT == "an average of parameters":
                factor = 1 + average.change(net)
            elif HABIT == "a long list":
                losses[7] = 0.9 * losses[7] + step.index
                factor = 1 + losses[7]
            elif HABIT == "a queue in a local variable":
                queue = torch.cat([x, queue])[:HELD]
                factor = 1 + queue[:40].square().sum()
            elif HABIT == "a ring in a local variable":
                ring[filled : filled + 4] = x
                filled = (filled + 4) % HELD
                ring[-1] += x.mean(0)
                factor = 1 + ring.square().sum()
            table.change()
            vars(net)["table"].add_(1)
            (model(x).square().mean() / factor).backward()
            if HABIT == "keyed by parameters":
                momentum.change(net)
            optimizer.step()
            optimizer.zero_grad()
    held = {"queue": queue, "ring": ring, "losses": losses, "average": average.weights, "all": statistics.all}
    leave(dist.get_rank(), {"model": net.state_dict(), "optimizer": optimizer.state_dict(), **held})


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
