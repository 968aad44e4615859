"""Wrong use of a session, one kind per argument."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import swift_ft

kind, store = sys.argv[1:3]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
if kind.endswith(" left out"):
    del state[kind.removesuffix(" left out").rpartition(" ")[2]]
session = swift_ft.Session(state, store=store)
if kind == "two sessions" or (kind == "two sessions on one worker" and rank == 0):
    swift_ft.Session(state, store=store)
if kind == "two sessions on one worker":
    dist.barrier()
if kind == "not attached":
    next(iter(session.steps(1)))
if kind == "no schedule":
    session.attach_pipeline(model)
if kind == "no DDP":
    session.attach_ddp(model)
if kind == "DDP of DTensors":
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
    split = parallelize_module(torch.nn.Linear(4, 4), mesh["tp"], ColwiseParallel())
    session.attach_ddp(DistributedDataParallel(split, device_mesh=mesh["dp"]))
if kind.startswith("DDP"):
    replica = DistributedDataParallel(model)
    session.attach_ddp(replica)
    for step in session.steps(3):
        with step:
            replica(torch.ones(4, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
stage = PipelineStage(model, rank, world, torch.device("cpu"))
schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
session.attach_pipeline(schedule)
if kind == "two pipelines":
    session.attach_pipeline(schedule)
loop: Any = session if kind == "plain loop" else session.steps(3)
late: Any = None
for step in loop:
    if kind == "without with":
        continue
    with step:
        batch = torch.ones(4, 4)
        schedule.step(*[batch] if rank == 0 else [], target=batch)
        if kind.startswith("a collective"):
            if late is not None:
                late.wait()
            late = dist.all_reduce(torch.ones(1), async_op=True)
        optimizer.step()
        scheduler.step()
        if kind != "gradients carried over":
            optimizer.zero_grad()
    if kind == "a collective that is waited for after its step":
        late.wait()
    if kind == "a batch between steps":
        schedule.step(*[batch] if rank == 0 else [], target=batch)
    if kind == "validation between steps":
        schedule.eval(*[batch] if rank == 0 else [], target=batch)
