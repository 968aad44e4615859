"""A line of a file for each iteration, by step.once(), in the stages of a pipeline or in replicas.

Replicas communicate after their update, so that a loss there leads all back to the last checkpoint.

    records.py STORE pipeline|replicas
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.habits import attach, leave

PIPELINE = sys.argv[2] == "pipeline"


def write(rank: int, iteration: int, loss: float) -> None:
    with Path(os.environ["SWIFT_TEST_FOLDER"], f"records{rank}.txt").open("a") as file:
        print(iteration, loss, file=file)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    model: Any = net if PIPELINE else DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    session = swift_ft.Session(
        {"model": model, "optimizer": optimizer}, store=sys.argv[1], checkpoint_every=3
    )
    schedule = attach(session, model, pipeline=PIPELINE)
    for step in session.steps(8):
        with step:
            time.sleep(0.1)  # longer than the word of a record takes
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step.index))
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            if PIPELINE:
                schedule.step(*[x] if rank == 0 else [], target=x.sin(), losses=losses)
            else:
                losses.append(nn.functional.mse_loss(model(x), x.sin()))
                losses[0].backward()
            optimizer.step()
            mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
            if not PIPELINE:
                dist.all_reduce(mean)
            if losses:
                step.once(write, rank, step.index, mean.item())
    leave(rank, {"model": net.state_dict(), "optimizer": optimizer.state_dict()})


main()
