"""DDP under swift-run: a lost worker gets its state from its replica."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from work import Trace, Work, parse_arguments

import swift_ft


def main() -> None:
    args = parse_arguments(__doc__, ("--store", {"required": True}))
    dist.init_process_group("gloo")
    trace = Trace(args.trace, dist.get_rank())
    trace("joined")
    work = Work(args, dist.get_rank(), trace)
    model = DistributedDataParallel(work.model)
    optimizer = swift_ft.wrap_optimizer(work.optimizer)
    # As in plain DDP, no checkpoint falls into the run.
    session = swift_ft.Session(
        {"model": model, "optimizer": optimizer}, store=args.store, checkpoint_every=100 * args.iterations
    )
    session.attach_ddp(model)
    machine = (int(os.environ["SWIFT_AGENT_PID"]),)
    for step in session.steps(args.iterations):
        work.trace("begin", iteration=step.index)
        with step:
            work.kill_when_due(step.index, also=machine)
            work.loss(model, step.index).backward()
            optimizer.step()
            optimizer.zero_grad()
            work.trace.end(step.index)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
