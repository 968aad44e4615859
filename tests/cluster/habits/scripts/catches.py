"""Steps that catch what their communication raises, and go on with what they have, or raise another error."""

import contextlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.copies import wait_for_copy
from tests.support.habits import leave

ITERATIONS, MICROBATCHES = 8, 4
store, kind, habit = sys.argv[1:]

dist.init_process_group("gloo")
rank, workers = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank if kind == "pipeline" else 0)
inner: Any = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
if kind == "ddp":
    model: Any = DistributedDataParallel(inner, bucket_cap_mb=0.0005)
else:
    model = fully_shard(inner) if kind == "fsdp" else inner


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
if habit != "a plain optimizer":
    optimizer = swift_ft.wrap_optimizer(optimizer, exact=habit != "an undo that rounds")
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
session = swift_ft.Session(
    state, store=store, checkpoint_every=4, snapshot_every=1 if kind == "fsdp" else None
)
schedule: Any = None
if kind == "ddp":
    session.attach_ddp(model)
elif kind == "pipeline":
    stage = PipelineStage(model, rank, workers, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_fn)
    session.attach_pipeline(schedule)


def passes(index: int) -> Tensor:
    """The forward and the backward passes of a step."""
    data = torch.Generator().manual_seed(index if kind == "pipeline" else workers * index + rank)
    x, y = torch.randn(8, 8, generator=data), torch.randn(8, 8, generator=data)
    if schedule is not None:
        losses: list[Tensor] = []
        schedule.step(*[x] if rank == 0 else [], target=y, losses=losses)
        return torch.stack(losses).mean() if losses else torch.zeros(())
    loss = loss_fn(model(x), y)
    loss.backward()
    return loss.detach()


def update() -> None:
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


class StepFailedError(Exception):
    """An error of the script's own."""


for step in session.steps(ITERATIONS):
    with step:
        if kind == "fsdp":
            wait_for_copy(session, step.index)
        if habit == "the body":
            try:
                passes(step.index)
                update()
            except Exception as error:
                print(f"skipping {step.index}: {error}", flush=True)
                continue
        elif habit == "breaks" or (habit == "the first one breaks" and rank == 0):
            try:
                passes(step.index)
            except RuntimeError:
                break
            update()
        elif habit == "exits" or (habit == "the first one exits" and rank == 0):
            try:
                passes(step.index)
            except RuntimeError:
                sys.exit()
            update()
        elif habit == "ends its process":
            try:
                passes(step.index)
            except RuntimeError:
                os._exit(0)
            update()
        elif habit in ("the first one breaks", "the first one exits"):
            passes(step.index)
            update()
        elif habit == "another error":
            failed = False
            try:
                passes(step.index)
            except Exception:
                failed = True
            if failed:
                raise StepFailedError("not a number")
            update()
        elif habit == "from none":
            try:
                passes(step.index)
            except RuntimeError as error:
                raise StepFailedError(str(error)) from None
            update()
        elif habit == "its own collective":
            mean = passes(step.index)
            with contextlib.suppress(RuntimeError):
                dist.all_reduce(mean)
            optimizer.param_groups[0]["weight_decay"] = 0.01 * mean.item()
            update()
        elif habit == "its own error":
            passes(step.index)
            if step.index == 5 and rank == 0:
                raise StepFailedError("a fault of the script")
            update()
        elif habit == "an argument":
            mean = passes(step.index)
            try:
                dist.all_reduce(mean.to(torch.float8_e4m3fn))  # gloo does not know it
            except RuntimeError:
                dist.all_reduce(mean)
            update()
        elif habit == "an argument alone":
            mean = passes(step.index)
            if step.index == 5:
                dist.all_reduce(mean.to(torch.float8_e4m3fn))
            update()
        else:  # the passes alone
            with contextlib.suppress(Exception):
                passes(step.index)
            update()

leave(
    rank,
    {
        "model": {n: t.to_local() if hasattr(t, "to_local") else t for n, t in model.state_dict().items()},
        "moments": [
            {k: v.to_local() if hasattr(v, "to_local") else v for k, v in optimizer.state[p].items()}
            for p in model.parameters()
        ],
        "rates": [group["lr"] for group in optimizer.param_groups],
    },
)
dist.destroy_process_group()
