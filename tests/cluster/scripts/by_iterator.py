"""A training that takes its batches from an iterator: a pipeline, or replicas.

by_iterator.py KIND STORE CHECK [reads | prefetches | trainer]

Nothing tells it that an iteration is repeated, so it gives that iteration the next batch. One script reads
the step's index for its rate. Others keep the next batch in an object, beside the iterator.
"""

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import swift_ft

kind, store, check = sys.argv[1:4]
habit = sys.argv[4] if len(sys.argv) > 4 else ""
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank if kind == "pipeline" else 0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = {"model": model, "optimizer": optimizer}
session = swift_ft.Session(state, store=store, checkpoint_every=3, check_data=check == "check")


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    while True:
        yield torch.randn(4, 4, generator=generator)


class Prefetcher:
    """In the manner of apex."""

    def __init__(self) -> None:
        self.loader = batches()
        self.preload()

    def preload(self) -> None:
        self.next_input = next(self.loader)

    def next(self) -> torch.Tensor:
        batch = self.next_input
        self.preload()
        return batch


class Trainer:
    def __init__(self) -> None:
        self.prefetcher = Prefetcher()


def next_batch() -> torch.Tensor:
    if habit == "prefetches":
        return prefetcher.next()
    return trainer.prefetcher.next() if habit == "trainer" else next(data)


if habit == "prefetches":
    prefetcher = Prefetcher()
elif habit == "trainer":
    trainer = Trainer()
else:
    data = batches()
if kind == "pipeline":
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    session.attach_pipeline(schedule)
else:
    replica = DistributedDataParallel(model)
    session.attach_ddp(replica)
for step in session.steps(8):
    with step:
        batch = next_batch()
        if habit == "reads":
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step.index)
        if kind == "pipeline":
            schedule.step(*[batch] if rank == 0 else [], target=batch)
        else:
            replica(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
