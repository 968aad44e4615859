"""Two replicas of a small model, in few lines, with an output file. PLANTED plants a bug into it.

The bug: a worker whose process begins in a later generation scales its gradients, so that whatever comes back
after a loss trains on with other weights. Nothing says so.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import swift_ft

parser = argparse.ArgumentParser()
parser.add_argument("--store", default="store")
parser.add_argument("--iterations", type=int, default=6)
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
session = swift_ft.Session(
    {"model": model, "optimizer": optimizer, "scheduler": scheduler}, store=args.store, checkpoint_every=2
)
session.attach_ddp(model)


def came_back() -> bool:
    """Asked in each step: a variable of a replacement is what it was in the worker whose place it takes."""
    return "PLANTED" in os.environ and session._assembly._participant.context.started_in > 1


for step in session.steps(args.iterations):
    with step:
        optimizer.zero_grad()
        x = torch.full((3, 4), float(step.index + 1 + dist.get_rank()))
        (model(x).square().sum() * (2.0 if came_back() else 1.0)).backward()
        optimizer.step()
        scheduler.step()
if dist.get_rank() == 0:
    Path(args.store).with_name("weights.txt").write_text(repr([p.tolist() for p in model.parameters()]))
dist.destroy_process_group()
