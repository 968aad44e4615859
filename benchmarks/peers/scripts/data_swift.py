"""Data parallel under swift-run: a lost worker gets its state from a replica."""

import torch
import torch.distributed as dist
from gpt import Batches, Config, build_stage, loss_fn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from benchmarks.peers.scripts.harness import Harness, parse_arguments


def main() -> None:
    """Trains one worker's replica."""
    args = parse_arguments(__doc__, ("--store", {}), ("--checkpoint-every", {"type": int}))
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    config = Config.from_args(args)
    batches = Batches(config)
    model = DistributedDataParallel(build_stage(0, 1, config))
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    harness = Harness(args, rank, model)
    state = {"model": model, "optimizer": optimizer}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_ddp(model)
    for step in session.steps(args.iterations):
        with step, harness.iteration(step.index):
            x, y = (part.chunk(workers)[rank] for part in batches[step.index])
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
