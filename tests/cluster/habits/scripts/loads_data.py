"""A replica whose data come from processes of their own, of which one is killed in the first life.

    loads_data.py STORE how

``killed``: by SIGKILL, as the kernel ends a process for want of memory. ``bus``: by SIGBUS, as when shared
memory is full. ``raises``: it is the data set that fails.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import swift_ft
from swift_ft.config.worker_context import WorkerContext
from swift_ft.data import IndexedBatches
from tests.support.habits import leave

how, context = sys.argv[2], WorkerContext.from_env()
ITERATIONS = 6


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 2 * ITERATIONS

    def __getitem__(self, index: int) -> Tensor:
        if index == 8 and context.rank == 1 and context.started_in == 1:
            if how == "raises":
                raise LookupError("row 8 is damaged")
            if how != "undisturbed":
                os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGBUS)
        return torch.full((4,), 1.0 + index + context.rank)


dist.init_process_group("gloo")
torch.manual_seed(context.rank)
model = DistributedDataParallel(nn.Linear(4, 4))
optimizer = swift_ft.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=sys.argv[1], checkpoint_every=2)
session.attach_ddp(model)
batches = IndexedBatches(Rows(), batch_size=2, num_workers=1)
for step in session.steps(ITERATIONS):
    with step:
        model(batches[step.index]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
leave(context.rank, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
