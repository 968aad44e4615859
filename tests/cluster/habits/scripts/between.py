"""Replicas, or the stages of a pipeline, whose functions between two steps keep what they know in variables.

between.py STORE HABIT [pipeline]
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.habits import attach, leave
from tests.support.machines import die, is_first_process

STORE, HABIT = sys.argv[1:3]
PIPELINE = sys.argv[3:] == ["pipeline"]
LOSSES = {2: 3.0, 4: 4.0, 6: 5.0, 8: 2.0, 10: 2.5}
"""Of the validations, by iteration: two in a row are worse than the best one before."""


class Counting(nn.Tanh):
    """It counts its calls, in evaluations, too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.means = 0, list[float]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not self.training:
            self.means.append(x.mean().item())
        return super().forward(x)


class Averages:
    """Of the weights, put in place and taken out again as ``torch_ema`` and ``diffusers`` do."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.average = [one.detach().clone() for one in module.parameters()]
        self._stored: list[Tensor] = []

    def update(self) -> None:
        for mean, weight in zip(self.average, self._module.parameters(), strict=True):
            mean.lerp_(weight.detach(), 0.5)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        self._stored = [one.detach().clone() for one in self._module.parameters()]
        self._write(self.average)
        yield
        self._write(self._stored)

    def _write(self, values: list[Tensor]) -> None:
        for weight, value in zip(self._module.parameters(), values, strict=True):
            weight.data.copy_(value)


def batch(index: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * index + (0 if PIPELINE else rank)))


def main() -> None:
    folder = Path(os.environ["SWIFT_TEST_FOLDER"])
    torch.manual_seed(rank if PIPELINE else 0)
    net = nn.Sequential(nn.Linear(6, 6), counting := Counting())
    model: nn.Module = net if PIPELINE else DistributedDataParallel(net)
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2))
    session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=STORE, checkpoint_every=4)
    schedule = attach(session, model, pipeline=PIPELINE)
    averages = Averages(net)
    best, bad, reached, seen = float("inf"), 0, [0], []

    def die_once(where: str) -> None:
        if where == HABIT and rank == 0 and session.iteration == 8 and is_first_process():
            die()

    def validate() -> float:
        loss = torch.tensor(LOSSES[session.iteration] / 2)
        if HABIT.startswith("averaged weights"):
            with averages.in_place():
                loss += net(batch(-1)).square().mean().item()
                die_once("averaged weights, lost among them")
                dist.all_reduce(loss)
            return loss.item()
        if HABIT == "a counter in forward":
            net.eval()
            schedule.eval(*[batch(-1)] if rank == 0 else [], target=batch(-1))
        die_once("exits")
        if HABIT == "exits":
            try:
                dist.all_reduce(loss)
            except RuntimeError:
                sys.exit(0)
            return loss.item()
        dist.all_reduce(loss)
        return loss.item()

    def judge(loss: float) -> None:
        nonlocal best, bad
        if loss < best:
            best, bad = loss, 0
            die_once("lost as it is saved")
            if rank == 0:
                (folder / "out").mkdir(exist_ok=True)
                torch.save([session.iteration, best], folder / "out" / "best.pt")
        else:
            bad += 1
        reached[0] += 1
        seen.append(loss)
        if bad == 2 and HABIT != "in the function itself":
            optimizer.param_groups[0]["lr"] *= 0.5

    def judge_at_once() -> None:
        judge(validate())

    if HABIT == "in the function itself":
        session.between(judge_at_once, every=2)
    else:
        session.between(validate, every=2, then=judge)
    for step in session.steps(10):
        with step:
            x = batch(step.index)
            if PIPELINE:
                schedule.step(*[x] if rank == 0 else [], target=x)
            else:
                (model(x).square().mean() * (1 + bad)).backward()
            optimizer.step()
            optimizer.zero_grad()
            averages.update()
    rates = [group["lr"] for group in optimizer.param_groups]
    rates += [counting.calls, *counting.means]
    facts = {"best": best, "bad": bad, "reached": reached[0], "seen": seen, "rates": rates}
    leave(rank, {"model": net.state_dict(), "optimizer": optimizer.state_dict(), **facts})


dist.init_process_group("gloo")
rank = dist.get_rank()
main()
dist.destroy_process_group()
