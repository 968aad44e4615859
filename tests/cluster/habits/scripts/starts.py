"""A script whose lines before its first step do something else in the place of a lost worker.

starts.py STORE HABIT [pipeline]
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

STORE, HABIT = sys.argv[1:3]
PIPELINE = sys.argv[3:] == ["pipeline"]
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
ITERATIONS = 8


def main() -> None:
    """Trains, and saves checkpoints of its own, which it looks for at its beginning."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank if PIPELINE else 0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start, history, began = 0, list[int](), time.time_ns() if HABIT == "notes the time" else 0
    last = FOLDER / "last.pt"
    if HABIT == "resumes itself" and last.exists():
        saved = torch.load(last)
        model.load_state_dict(saved["model"])
        start, history = saved["iteration"], saved["history"]
    name = f"version_{len([*FOLDER.glob('version_*')])}"
    dist.barrier()
    if HABIT == "numbers its folders" and rank == 0:
        (FOLDER / name).mkdir()
    replica = model if PIPELINE else DistributedDataParallel(model)
    session = swift_ft.Session({"model": replica, "optimizer": optimizer}, store=STORE, checkpoint_every=3)
    schedule: Any = attach(session, replica, pipeline=PIPELINE)

    def save() -> None:
        if rank == 0 and HABIT == "resumes itself":
            state = {"model": model.state_dict(), "iteration": start + session.iteration, "history": history}
            torch.save(state, last)

    session.between(save, every=2)
    for step in session.steps(ITERATIONS):
        with step:
            now = start + step.index
            generator = torch.Generator().manual_seed(step.index + (0 if PIPELINE else 100 * rank))
            x, y = torch.randn(2, 4, 6, generator=generator)
            optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (now + 1) / 10)
            if schedule is None:
                (replica(x) - y).square().mean().backward()
            else:
                schedule.step(*[x] * (rank == 0), **({"target": y} if rank else {}))
            optimizer.step()
            optimizer.zero_grad()
            history.append(now)
    if HABIT == "notes the time":
        assert began
    ended = {"model": model.state_dict(), "history": history, "start": start}
    leave(rank, ended if HABIT != "numbers its folders" else {**ended, "name": name})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
