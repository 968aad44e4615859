"""Replicas, or stages of a pipeline, whose script changes rates, decay, betas or an average around the step.

rates.py STORE HABIT [pipeline]
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import swift_ft
from tests.support.habits import attach, leave

STORE, HABIT = sys.argv[1:3]
PIPELINE = sys.argv[3:] == ["pipeline"]
ITERATIONS = 8

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank if PIPELINE else 0)
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))
model: nn.Module = net if PIPELINE else DistributedDataParallel(net)
tensor_rate = HABIT == "tensor rate"
trained = net[2] if HABIT == "another function" else model
optimizer = torch.optim.AdamW(trained.parameters(), lr=torch.tensor(1e-2) if tensor_rate else 1e-2)
if HABIT != "plain optimizer":
    swift_ft.wrap_optimizer(optimizer)
state: dict[str, Any] = {"model": model, "optimizer": optimizer}
schedulers: dict[str, Callable[[], Any]] = {
    "linear": lambda: lr_scheduler.LinearLR(optimizer, total_iters=6),
    "lambda": lambda: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "another function": lambda: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "exponential": lambda: lr_scheduler.ExponentialLR(optimizer, 0.8),
    "tensor rate": lambda: lr_scheduler.ExponentialLR(optimizer, 0.8),
    "plain optimizer": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 10),
}
scheduler = schedulers[HABIT]() if HABIT in schedulers else None
if scheduler is not None:
    state["scheduler"] = scheduler
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8)) if HABIT == "average" else None
if ema is not None:
    state["ema"] = ema


def scale_state(factor: float) -> None:
    """By hand, of what the optimizer keeps."""
    for fields in optimizer.state.values():
        fields["exp_avg"].mul_(factor)


def renew_state() -> None:
    """Begin with new averages, as at a warm restart."""
    for fields in optimizer.state.values():
        fields["exp_avg_sq"] = fields["exp_avg_sq"] * 2.0


last_rate = 1e-2
session = swift_ft.Session(state, store=STORE, checkpoint_every=3)
schedule = attach(session, model, pipeline=PIPELINE)
for step in session.steps(ITERATIONS):
    group = optimizer.param_groups[0]
    if HABIT == "at the top" and step.index == 4:
        group["lr"] *= 0.5
    if HABIT.startswith("momentum correction"):
        rate = 1e-2 if step.index < 4 else 5e-3
        if rate != last_rate or HABIT == "momentum correction in each step":
            scale_state(0.9 * rate / last_rate)
        group["lr"] = last_rate = rate
    if HABIT == "betas at the top":
        group["betas"] = (group["betas"][0] * 0.98, group["betas"][1])
    with step:
        if HABIT == "another function" and step.index == 4:
            assert isinstance(scheduler, lr_scheduler.LambdaLR)
            optimizer.add_param_group({"params": net[0].parameters(), "lr": 5e-3, "initial_lr": 5e-3})
            scheduler.base_lrs.append(5e-3)
            scheduler.lr_lambdas.append(lambda epoch: 0.8**epoch)
        generator = torch.Generator().manual_seed(10 * step.index + (0 if PIPELINE else rank))
        x = torch.randn(4, 6, generator=generator)
        if PIPELINE:
            schedule.step(*[x] if rank == 0 else [], target=x)
        else:
            model(x).square().mean().backward()
        optimizer.step()
        net.zero_grad()
        if HABIT == "averages pruned after the update" and step.index % 2:
            scale_state(0.5)
        if HABIT == "clamp":
            for parameter in net.parameters():
                parameter.data.clamp_(-0.3, 0.3)
    if scheduler is not None:
        scheduler.step()
    if ema is not None:
        ema.update_parameters(net)
    if HABIT == "one index" and step.index == 4:
        group["lr"] *= 0.5
    if HABIT == "averages renewed between":
        renew_state()
    if HABIT == "decay":
        group["weight_decay"] += 0.01

leave(rank, {name: part.state_dict() for name, part in state.items()})
dist.destroy_process_group()
