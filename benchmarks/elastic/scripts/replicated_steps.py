"""Two pipelines of the GPT of the examples: DDP around each stage, or a LayerStack.

A LayerStack's second pipeline is cut otherwise than its first one, from iteration 6 or so on. Each
worker writes its steps.
"""

import argparse
import json
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import Batches, Config, build_layer, loss_fn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from swift_ft.recovery.job_state import State
from swift_ft.recovery.layout.stage_layers import even_layout, layers_of
from swift_ft.runtime.elastic.rebalance import Rebalance

PIPELINES, UNLIKE, FROM = 2, (5, 5, 4, 6), 4

parser = argparse.ArgumentParser()
parser.add_argument("--store")
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--iterations", type=int, required=True)
parser.add_argument("--way", choices=("ddp", "unlike", "exact"), required=True)
args = parser.parse_args()


def unlike(_: Rebalance, state: State, iteration: int) -> Any:
    """The layout to ask for, once."""
    return UNLIKE if iteration >= FROM and not state.layouts.changes else None


Rebalance.wanted = unlike  # type: ignore[method-assign, assignment]

dist.init_process_group("gloo")
rank, stages = dist.get_rank(), dist.get_world_size() // PIPELINES
config = Config(dropout=0.0)
count = config.layers + 2
model: nn.Module
torch.manual_seed(1)
if args.way == "ddp":
    mesh = init_device_mesh("cpu", (PIPELINES, stages), mesh_dim_names=("replica", "stage"))
    pipeline, own = mesh.get_local_rank("replica"), mesh.get_local_rank("stage")
    layers = layers_of(even_layout(count, stages), own)
    parts = nn.Sequential(OrderedDict((str(number), build_layer(number, config)) for number in layers))
    model = DistributedDataParallel(parts, process_group=mesh.get_group("replica"))
    stage = PipelineStage(model, own, stages, torch.device("cpu"), group=mesh.get_group("stage"))
else:
    model = stack = swift_ft.LayerStack(
        lambda number: build_layer(number, config), count, pipelines=PIPELINES, exact=args.way == "exact"
    )
    pipeline = stack.pipeline
    stage = PipelineStage(stack, stack.stage, stages, torch.device("cpu"), group=stack.group)
schedule = Schedule1F1B(stage, config.microbatches, loss_fn=loss_fn)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = Batches(config)
times: list[tuple[float, float]] = []


def train_step(index: int) -> None:
    """One step."""
    x, y = batches[index * PIPELINES + pipeline]
    schedule.step(*[x] if stage.is_first else [], target=y, return_outputs=False)
    optimizer.step()
    optimizer.zero_grad()


def note(began: float, used: float) -> None:
    """Its wall time and its CPU time."""
    times.append((time.perf_counter() - began, time.process_time() - used))


if args.way == "ddp":
    for index in range(args.iterations):
        start = time.perf_counter(), time.process_time()
        train_step(index)
        note(*start)
else:
    state = {"model": model, "optimizer": optimizer}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=10**6)
    session.attach_pipeline(schedule)
    for step in session.steps(args.iterations):
        start = time.perf_counter(), time.process_time()
        with step:
            train_step(step.index)
        note(*start)
args.out.with_name(f"steps{rank}.json").write_text(json.dumps(times))
dist.destroy_process_group()
