"""Two replicas, one of which fails in its own way.

goes_wrong.py STORE FOLDER HOW
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import swift_ft
from swift_ft.runtime.slowness import part

STORE, FOLDER, HOW = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
AT = 5
STRUCK = FOLDER / "struck"

if HOW == "hangs":  # seconds, where it is a minute
    part._FOR_OTHERS_S = 15.0
# Torch's own timeout ends the wait for a worker that is stuck, after that one has said where it is.
dist.init_process_group("gloo", timeout=timedelta(seconds=16) if HOW == "stuck" else None)
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 6))
optimizer = swift_ft.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))


def begin_late() -> None:
    """Worker 1 does, once: in a replacement after the loss of the first one, or at the start."""
    mark = FOLDER / "late"
    if rank == 1 and HOW.startswith("late") and not mark.exists() and (HOW == "late" or STRUCK.exists()):
        mark.touch()
        time.sleep(600)


def meet_an_outage() -> None:
    """Worker 1 does, twice: in the replacements after the loss of the first one."""
    if rank == 1 and HOW == "outage" and STRUCK.exists():
        for mark in (FOLDER / "met", FOLDER / "met again"):
            if not mark.exists():
                mark.touch()
                raise ConnectionError("the data server does not answer")


begin_late()
meet_an_outage()
session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=STORE, checkpoint_every=3)
session.attach_ddp(model)


class Labels(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        raise ValueError(f"sample {index} has no label")


def go_wrong() -> None:
    """Once, or each time."""
    if HOW == "each time":
        raise ValueError(f"sample {AT} has no label")
    if HOW == "bad sample":
        Labels()[AT]
    if STRUCK.exists() or HOW == "late":
        return
    STRUCK.touch()
    if HOW == "no memory":
        torch.empty(1 << 46)
    if HOW == "holds":
        sum(range(10**12))  # without letting the interpreter go
    while HOW == "stuck":
        signal.pause()  # which ends with a signal: its agent asks where it is
    if HOW == "hangs":
        time.sleep(28)
        return
    print("the tape is torn", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV if HOW == "segfault" else signal.SIGKILL)


def wait_for_the_others() -> None:
    """Hold the run until ``said`` is there, where the test has made ``waits``."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (FOLDER / "waits").exists() and not (FOLDER / "said").exists():
        time.sleep(0.1)


for step in session.steps(8):
    if rank == 1 and step.index == AT + 1:
        wait_for_the_others()
    with step:
        if rank == 1 and step.index == AT:
            go_wrong()
        model(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print(f"worker {rank} is done", flush=True)
dist.destroy_process_group()
