"""Wrong use of a session, one kind per argument."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import swift_ft

kind, store = sys.argv[1:3]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = {"model": model, "optimizer": optimizer}
session = swift_ft.Session(state, store=store)
if kind == "two sessions":
    swift_ft.Session(state, store=store)
if kind == "not attached":
    next(iter(session.steps(1)))
if kind == "no schedule":
    session.attach_pipeline(model)
if kind == "no DDP":
    session.attach_ddp(model)
stage = PipelineStage(model, rank, world, torch.device("cpu"))
schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
session.attach_pipeline(schedule)
if kind == "two pipelines":
    session.attach_pipeline(schedule)
for step in session.steps(3):
    if kind == "without with":
        continue
    with step:
        batch = torch.ones(4, 4)
        schedule.step(*[batch] if rank == 0 else [], target=batch)
        optimizer.step()
        if kind != "gradients carried over":
            optimizer.zero_grad()
