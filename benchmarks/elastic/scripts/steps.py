"""A pipeline of a LayerStack, or of plain modules with the same layers. Each worker writes its steps."""

import argparse
import json
import time
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Batches, Config, build_layer, loss_fn
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import swift_ft
from swift_ft.recovery.layout.stage_layers import even_layout, layers_of

parser = argparse.ArgumentParser()
parser.add_argument("--store", required=True)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--iterations", type=int, required=True)
parser.add_argument("--stack", action="store_true")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, workers = dist.get_rank(), dist.get_world_size()
config = Config(dropout=0.1)
count = config.layers + 2
model: nn.Module
if args.stack:
    model = swift_ft.LayerStack(lambda number: build_layer(number, config), count)
else:
    own = layers_of(even_layout(count, workers), rank)
    model = nn.Sequential(OrderedDict((str(number), build_layer(number, config)) for number in own))
stage = PipelineStage(model, rank, workers, torch.device("cpu"))
schedule = Schedule1F1B(stage, config.microbatches, loss_fn=loss_fn)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = Batches(config)
session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=args.store, checkpoint_every=10**6)
session.attach_pipeline(schedule)
times = []
for step in session.steps(args.iterations):
    began, used = time.perf_counter(), time.process_time()
    with step:
        x, y = batches[step.index]
        schedule.step(*[x] if rank == 0 else [], target=y, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
    times.append((time.perf_counter() - began, time.process_time() - used))
args.out.with_name(f"steps{rank}.json").write_text(json.dumps(times))
dist.destroy_process_group()
