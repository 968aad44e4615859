"""Layers that compute nothing and take their time: each machine has one device, which its workers share.

They are one pipeline, or several that are replicas of each other and share global batches. Each worker writes
what session.plan() says, and its steps. Two processes that sleep would not slow each other down, as two that
compute on one device do. So who sleeps holds the lock of its machine's device.
"""

import argparse
import fcntl
import functools
import json
import time
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import swift_ft
from benchmarks.elastic.scripts.slept import FORWARD_MS, MICROBATCH, MICROBATCHES, Layer, Noise
from swift_ft.recovery.devices import device_of

ASKED_AT = 12

parser = argparse.ArgumentParser()
parser.add_argument("--store", required=True)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--iterations", type=int, required=True)
parser.add_argument("--pipelines", type=int, default=1)
parser.add_argument("--slow", type=int, help="a worker that takes three times as long")
parser.add_argument("--slow-from", type=int, default=0, help="from this iteration on")
args = parser.parse_args()


@functools.cache
def device() -> IO[str]:
    """The lock of this worker's device. A guest has its host's."""
    state = session._assembly._participant.state
    name: str = device_of(state, rank).replace("/", "-")
    folder: Path = args.out.parent
    return (folder / f"device-{name}").open("w")


def busy(milliseconds: int) -> None:
    """Use the device of this machine."""
    if slowed:
        milliseconds *= 3
    fcntl.flock(device(), fcntl.LOCK_EX)
    try:
        time.sleep(milliseconds / 1e3)
    finally:
        fcntl.flock(device(), fcntl.LOCK_UN)


dist.init_process_group("gloo")
rank = dist.get_rank()
model = swift_ft.LayerStack(lambda number: Layer(number, busy), len(FORWARD_MS), pipelines=args.pipelines)
stage = PipelineStage(model, model.stage, model.num_stages, torch.device("cpu"), group=model.group)
schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
batches = swift_ft.data.GlobalBatches(Noise(), args.pipelines * MICROBATCHES * MICROBATCH, shuffle=True)
state = {"model": model, "optimizer": optimizer, "batches": batches}
session = swift_ft.Session(state, store=args.store, checkpoint_every=10)
session.attach_pipeline(schedule)
times = []
slowed = False
plan: dict[str, Any] = {}
for step in session.steps(args.iterations):
    began = time.perf_counter()
    slowed = rank == args.slow and step.index >= args.slow_from
    with step:
        x, y = batches[step.index]
        schedule.step(*[x] if model.stage == 0 else [], target=y, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
    times.append((step.index, time.perf_counter() - began))
    if step.index == ASKED_AT and not step.replayed:
        plan = session.plan().to_dict()
args.out.with_name(f"steps{rank}.json").write_text(json.dumps({"plan": plan, "times": times}))
dist.destroy_process_group()
