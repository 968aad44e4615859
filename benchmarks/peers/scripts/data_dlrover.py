"""Data parallel under dlrover-run: all workers start again from the flash checkpoint."""

from pathlib import Path

import torch
import torch.distributed as dist
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
from gpt import Batches, Config, build_stage, loss_fn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.scripts.harness import Harness, parse_arguments


def main() -> None:
    """Trains one worker's replica."""
    args = parse_arguments(__doc__, ("--store", {"type": Path}), ("--checkpoint-every", {"type": int}))
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    config = Config.from_args(args)
    batches = Batches(config)
    model = DistributedDataParallel(build_stage(0, 1, config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    harness = Harness(args, rank, model)
    checkpointer = DdpCheckpointer(str(args.store))
    first = 0
    if loaded := checkpointer.load_checkpoint():
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        first = loaded["iteration"]
    for iteration in range(first, args.iterations):
        with harness.iteration(iteration):
            x, y = (part.chunk(workers)[rank] for part in batches[iteration])
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if (iteration + 1) % args.checkpoint_every == 0:
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state = {**parts, "iteration": iteration + 1}
            checkpointer.save_checkpoint(iteration + 1, state, storage_type=StorageType.DISK)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
