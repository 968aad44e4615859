"""A training for `swift-run --check`, with what its first argument names.

checked.py WHAT [LOOP]
"""

import itertools
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import swift_ft

WHAT, LOOP = (*sys.argv[1:], "steps")[:2]

if WHAT == "no training":
    sys.exit(0)
dist.init_process_group("gloo")
model: nn.Module = nn.Linear(6, 2)
if WHAT != "memory":
    model = DistributedDataParallel(model)
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())


class Bank:
    """Something of the script's own."""

    def __init__(self) -> None:
        self.array = np.zeros(200_000)


bank = Bank()


def train_step(x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


if WHAT == "no session":
    for index in itertools.count():
        train_step(torch.full((4, 6), float(index % 5)))

optimizer = swift_ft.wrap_optimizer(optimizer)
options: dict[str, Any] = {"snapshot_every": 5} if WHAT == "memory" else {}
session = swift_ft.Session(
    {"model": model, "optimizer": optimizer}, store="store", checkpoint_every=9, **options
)
if WHAT != "memory":
    session.attach_ddp(model)
loader = DataLoader(TensorDataset(torch.randn(64, 6)), batch_size=4)
steps = session.steps(1 if LOOP == "short" else 12)
if LOOP == "epochs":
    for epoch in session.epochs(5):
        if dist.get_rank() == 0:
            print(f"epoch {epoch}", flush=True)
        for step in session.steps(1):
            with step:
                train_step(torch.full((4, 6), float(epoch + step.index_in_epoch)))
elif LOOP == "iterator":
    batches = iter(loader)
    for step in steps:
        with step:
            train_step(next(batches)[0])
else:
    for step in steps:
        with step:
            if WHAT == "fails":
                raise ZeroDivisionError("on purpose")
            if WHAT == "array":
                bank.array[step.index] = 1.0
            train_step(torch.full((4, 6), float(step.index)))
print("after the loop", flush=True)
