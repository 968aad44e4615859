"""Light work on equal devices: a LayerStack, a pipeline of plain stages, or replicas in DDP.

Each layer computes a little and sleeps a little, so that whatever else runs on the machine is felt, and
little of the machine is taken. Each worker writes down, for each iteration, when it ended, how long its
layers took, and how long it waited for a core meanwhile.
"""

import argparse
import json
import time
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from benchmarks.elastic.scripts.slept import Layer
from swift_ft.recovery.layout.stage_layers import even_layout, layers_of

SLEPT_MS, COMPUTED = 3, 2
MICROBATCHES, MICROBATCH, WIDTH, LAYERS_EACH = 4, 4, 160, 2

parser = argparse.ArgumentParser()
parser.add_argument("--store", required=True)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--way", choices=("stack", "plain", "ddp"), required=True)
args = parser.parse_args()
took = 0.0


def busy(times: int) -> None:
    """Compute and sleep, ``times`` as much as a layer does forward."""
    global took
    began = time.perf_counter()
    for _ in range(times * COMPUTED):
        torch.mm(WORK, WORK)
    time.sleep(times * SLEPT_MS / 1e3)
    took += time.perf_counter() - began


def layer(number: int) -> Layer:
    """One of the model: every third one takes twice as long."""
    return Layer(number, busy, 1 + (number % 3 == 2), WIDTH)


def waited_s() -> float:
    """How long this thread could have run, and had no core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


WORK = torch.randn(WIDTH, WIDTH)
dist.init_process_group("gloo")
rank, workers = dist.get_rank(), dist.get_world_size()
count = LAYERS_EACH * workers
model: nn.Module
if args.way == "ddp":
    model = DistributedDataParallel(nn.Sequential(*[layer(number) for number in range(LAYERS_EACH)]))
elif args.way == "stack":
    model = swift_ft.LayerStack(layer, count)
else:
    own = layers_of(even_layout(count, workers), rank)
    model = nn.Sequential(OrderedDict((str(number), layer(number)) for number in own))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=args.store, checkpoint_every=500)
if args.way == "ddp":
    session.attach_ddp(model)
else:
    stage = PipelineStage(model, rank, workers, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    session.attach_pipeline(schedule)

with args.out.with_name(f"steps{rank}.jsonl").open("a", buffering=1) as file:
    for step in session.steps(10**9):  # until the run is ended from outside
        took, waited = 0.0, waited_s()
        with step:
            x, y = torch.randn(2, MICROBATCHES * MICROBATCH, WIDTH)
            if args.way == "ddp":
                for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
                    nn.functional.mse_loss(model(part), target).backward()
            else:
                schedule.step(*[x] if rank == 0 else [], target=y, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
        file.write(json.dumps((step.index, time.time(), took, waited_s() - waited)) + "\n")
