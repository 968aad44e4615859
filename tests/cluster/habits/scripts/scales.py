"""Replicas, or shards, whose script unscales gradients and then communicates: scales.py STORE HOW FAULT."""

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import swift_ft
from tests.support.habits import leave
from tests.support.machines import is_first_process

STORE, HOW, FAULT = sys.argv[1:4]
ITERATIONS, LOST_IN = 8, 4

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model: Any = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
if HOW == "shards":
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if HOW == "replicas":
    swift_ft.wrap_optimizer(optimizer)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
options: dict[str, Any] = {"snapshot_every": 2} if HOW == "shards" else {}
state = {"model": model, "optimizer": optimizer, "scaler": scaler}
session = swift_ft.Session(state, store=STORE, checkpoint_every=3, **options)
if HOW == "replicas":
    session.attach_ddp(model)
for step in session.steps(ITERATIONS):
    with step:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step.index + rank))
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        if FAULT == "lost" and rank == 1 and step.index == LOST_IN and is_first_process():
            os.kill(os.getpid(), signal.SIGKILL)
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if HOW == "replicas":
            dist.all_reduce(norm)  # for a log; with shards, the norm itself communicates
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

ended = {name: part.state_dict() for name, part in state.items()}
leave(rank, tree_map_only(DTensor, DTensor.to_local, ended))
dist.destroy_process_group()
