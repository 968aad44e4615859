"""DDP under swift-run: a lost worker gets its state from its replica."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from benchmarks.peers.scripts.work import Trace, Work, parse_arguments
from swift_ft.config.worker_context import WorkerContext


def main() -> None:
    """Trains, and marks the steps in the trace."""
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
    machine = (WorkerContext.from_env().agent_pid,)
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
