"""DDP under torchrun: without protection, or with DCP checkpoints from which all workers restart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.scripts.work import Trace, Work, parse_arguments


def main() -> None:
    """Trains, with checkpoints if there is a folder for them, and marks the steps in the trace."""
    args = parse_arguments(
        __doc__,
        ("--checkpoints", {"type": Path, "help": "folder, default: no checkpoints"}),
        ("--checkpoint-every", {"type": int, "default": 50}),
        ("--checkpoint-first", {"type": int, "default": 50, "help": "iterations before the first one"}),
    )
    dist.init_process_group("gloo")
    trace = Trace(args.trace, dist.get_rank())
    trace("joined")
    work = Work(args, dist.get_rank(), trace)
    model = DistributedDataParallel(work.model)
    for iteration in range(load(args.checkpoints, work), args.iterations):
        work.trace("begin", iteration=iteration)
        work.kill_when_due(iteration)
        work.loss(model, iteration).backward()
        work.optimizer.step()
        work.optimizer.zero_grad()
        work.trace.end(iteration)
        since_first = iteration + 1 - args.checkpoint_first
        if args.checkpoints and since_first >= 0 and since_first % args.checkpoint_every == 0:
            save(args.checkpoints / f"iteration-{iteration:08d}", work, iteration)
    dist.destroy_process_group()


def save(checkpoint: Path, work: Work, iteration: int) -> None:
    """Saves the state after ``iteration``; DCP commits it by writing ``.metadata`` last."""
    began = time.time()
    model_state, optimizer_state = get_state_dict(work.model, work.optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "iteration": iteration}
    dcp.save(state, checkpoint_id=checkpoint)
    work.trace("saved", iteration=iteration, seconds=time.time() - began)


def load(checkpoints: Path | None, work: Work) -> int:
    """Loads the last committed checkpoint, if there is one. Returns the iteration to continue with."""
    committed = sorted(path.parent for path in checkpoints.glob("*/.metadata")) if checkpoints else []
    if not committed:
        return 0
    model_state, optimizer_state = get_state_dict(work.model, work.optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "iteration": -1}
    dcp.load(state, checkpoint_id=committed[-1])
    set_state_dict(
        work.model, work.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return int(state["iteration"]) + 1


if __name__ == "__main__":
    main()
