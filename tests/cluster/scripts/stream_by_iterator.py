"""A StatefulDataLoader as its users have it: the loader in the state, and a loop over its iterator."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

import swift_ft

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = StatefulDataLoader(torch.arange(400.0).view(-1, 1), batch_size=4)
state = {"model": model, "optimizer": optimizer, "loader": loader}
session = swift_ft.Session(state, store=sys.argv[1], checkpoint_every=3)
session.attach_ddp(model)
batches = iter(loader)
for step in session.steps(10):
    with step:
        model(next(batches)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
