"""A small data-parallel training. A machine of the pool is not like the others.

python strange_machine.py STORE HABIT. What the third worker finds that starts, or each from then on:

model       one machine has another configuration of the model
model-all   each further machine has
data        one machine lacks the file with the data
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.habits import leave

STORE, HABIT = sys.argv[1:3]
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])


def number_of_this_start() -> int:
    with (FOLDER / "starts").open("ab") as starts:
        starts.write(b".")
        starts.flush()
        return starts.tell()


def main() -> None:
    start = number_of_this_start()
    strange = start > 2 if HABIT.endswith("-all") else start == 3
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    if strange and HABIT == "data":
        (FOLDER / "no-data-here").read_bytes()
    width = 12 if strange else 8
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = swift_ft.Session(
        {"model": model.module, "optimizer": optimizer}, store=STORE, checkpoint_every=3
    )
    session.attach_ddp(model)
    for step in session.steps(8):
        with step:
            data = torch.Generator().manual_seed(100 * step.index + rank)
            model(torch.randn(5, 4, generator=data)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    leave(rank, {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()})


main()
