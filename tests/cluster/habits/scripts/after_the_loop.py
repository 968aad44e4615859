"""Trains a few steps, and then does what scripts do after their loop.

after_the_loop.py STORE dies [--resume]    worker 1 is killed while it exports, once
after_the_loop.py STORE holds              worker 0 holds the interpreter for longer than a heartbeat may
after_the_loop.py STORE breaks             as ``holds``, after all have left the loop by ``break``
after_the_loop.py STORE leaves             all leave the loop by ``break`` as a checkpoint is being written
after_the_loop.py STORE exits              all end in a step then, by ``sys.exit(0)``
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import swift_ft
from tests.support.habits import leave

STEPS, LEFT_AT, SAVED_AT, HOLDS_S = 8, 5, 6, 3
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
store, habit = sys.argv[1:3]
swift_ft.deterministic()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=store, checkpoint_every=3)
session.attach_ddp(model)
for step in session.steps(STEPS):
    if habit == "breaks" and step.index == LEFT_AT:
        break
    if habit == "leaves" and step.index == SAVED_AT:
        break
    with step:
        if habit == "exits" and step.index == SAVED_AT:
            sys.exit(0)
        model(torch.ones(4, 8) * (step.index + rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
dist.barrier()
if habit == "dies":
    died = FOLDER / "died"
    if rank == 1 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
elif rank == 0 and habit != "leaves":
    ctypes.PyDLL(None).sleep(HOLDS_S)  # a call through PyDLL keeps the interpreter's lock
leave(rank, model.state_dict())
