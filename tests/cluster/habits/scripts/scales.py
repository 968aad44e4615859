"""Replicas whose script unscales gradients, and then communicates: scales.py STORE FAULT."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from swift_ft.config.worker_context import WorkerContext
from tests.support.habits import leave

STORE, FAULT = sys.argv[1:3]
ITERATIONS, LOST_IN = 8, 4

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)))
optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
state = {"model": model, "optimizer": optimizer, "scaler": scaler}
session = swift_ft.Session(state, store=STORE, checkpoint_every=3)
session.attach_ddp(model)
for step in session.steps(ITERATIONS):
    with step:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step.index + rank))
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        first_life = WorkerContext.from_env().started_in == 1
        if FAULT == "lost" and rank == 1 and step.index == LOST_IN and first_life:
            os.kill(os.getpid(), signal.SIGKILL)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        dist.all_reduce(norm)  # for a log
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

leave(rank, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()})
dist.destroy_process_group()
