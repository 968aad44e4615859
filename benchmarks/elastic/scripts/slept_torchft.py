"""The layers of slept_layers.py in one of two pipelines that torchft averages: a replica group of torchft's.

A machine is a worker, and one of the second pipeline's dies. Its torchrun does not start it again, because
there is no machine for it. Each worker writes its steps: when each ended, and of how many pipelines it was.
"""

# No `from __future__ import annotations`: torchft's wrappers look at annotations.
import argparse
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torchft import Manager, Optimizer, ProcessGroupGloo

from benchmarks.elastic.scripts.slept import FORWARD_MS, MICROBATCH, MICROBATCHES, WIDTH, Layer
from swift_ft.recovery.layout.stage_layers import even_layout, layers_of

TIMEOUT = timedelta(seconds=1)

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--iterations", type=int, required=True)
parser.add_argument("--pipeline", type=int, required=True)
parser.add_argument("--lost", type=int, required=True, help="the stage whose machine dies")
parser.add_argument("--lost-at", type=int, required=True)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, stages = dist.get_rank(), dist.get_world_size()
own = layers_of(even_layout(len(FORWARD_MS), stages), rank)
model = nn.Sequential(*[Layer(number, lambda milliseconds: time.sleep(milliseconds / 1e3)) for number in own])
stage = PipelineStage(model, rank, stages, torch.device("cpu"))
schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
inner = torch.optim.SGD(model.parameters(), lr=1e-3)


def load(state: Any) -> None:
    """What torchft calls in a replacement."""
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(TIMEOUT),
    load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
    min_replica_size=1,
    replica_id=f"pipeline_{args.pipeline}",
    init_sync=False,
    timeout=TIMEOUT,
    quorum_timeout=timedelta(seconds=60),  # the pipelines do not start at once
    connect_timeout=TIMEOUT,
)
optimizer = Optimizer(manager, inner)
times: list[tuple[int, float, int]] = []

while (index := manager.current_step()) < args.iterations:
    began = time.perf_counter()
    if (args.pipeline, rank) == (1, args.lost) and index == args.lost_at:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()  # torchft finds out who takes part
    x, y = torch.randn(2, MICROBATCHES * MICROBATCH, WIDTH)
    schedule.step(*[x] if rank == 0 else [], target=y, return_outputs=False)
    for parameter in model.parameters():
        manager.allreduce(parameter.grad).wait()
    optimizer.step()
    if manager.current_step() > index:
        times.append((index, time.perf_counter() - began, manager.num_participants()))
args.out.with_name(f"torchft{args.pipeline}{rank}.json").write_text(json.dumps(times))
manager.shutdown(wait=False)
dist.destroy_process_group()
