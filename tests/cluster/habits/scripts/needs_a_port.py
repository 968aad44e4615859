"""A replica that has a port and a folder of its own on its host, by its local rank.

    needs_a_port.py STORE habit

``taken``: the port of the first guest is taken by another program.
"""

import errno
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.habits import leave

local_rank, folder = int(os.environ["LOCAL_RANK"]), Path(os.environ["SWIFT_TEST_FOLDER"])
if sys.argv[2:] == ["taken"] and local_rank > 0 and not (folder / "taken").exists():
    (folder / "taken").touch()
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(nn.Linear(4, 4))
optimizer = swift_ft.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=sys.argv[1], checkpoint_every=3)
session.attach_ddp(model)
for step in session.steps(6):
    with step:
        batch = torch.full((2, 4), 1.0 + step.index + rank)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print(f"local rank {local_rank}", flush=True)
leave(rank, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
