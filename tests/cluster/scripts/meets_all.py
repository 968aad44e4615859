"""Two replicas, one of which meets one thing after another, each once.

meets_all.py STORE FOLDER
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from swift_ft.config.worker_context import WorkerContext
from swift_ft.runtime import steps
from tests.support.machines import die

STORE, FOLDER = sys.argv[1], Path(sys.argv[2])

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 6))
optimizer = swift_ft.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=STORE, checkpoint_every=3)
session.attach_ddp(model)


def cut() -> None:
    """Gloo's connections to the other worker end, as by a reset. Those to the rendezvous store are IPv6."""
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_socket():
            with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                if copy.family == socket.AF_INET and connected(copy):
                    copy.shutdown(socket.SHUT_RD)


def connected(one: socket.socket) -> bool:
    try:
        return bool(one.getpeername())
    except OSError:
        return False


def be_preempted() -> None:
    os.kill(WorkerContext.from_env().agent_pid, signal.SIGTERM)
    time.sleep(60)


def plant_a_defect() -> None:
    """The runtime's own code meets a value that it cannot use, when the step ends."""
    setattr(steps, "step_failures", None)  # noqa: B010  # it is not the module's to export


MEETS = {2: die, 4: cut, 6: be_preempted, 8: plant_a_defect}

for step in session.steps(10):
    with step:
        mark = FOLDER / f"met-{step.index}"
        if rank == 1 and step.index in MEETS and not mark.exists():
            mark.touch()
            MEETS[step.index]()
        model(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
