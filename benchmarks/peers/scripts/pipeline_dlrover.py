"""A pipeline under dlrover-run: all workers start again from the flash checkpoint."""

from pathlib import Path

import torch
import torch.distributed as dist
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
from gpt import Batches, Config, build_stage, loss_fn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.peers.scripts.harness import Harness, parse_arguments


def main() -> None:
    """Trains one worker's stage."""
    args = parse_arguments(__doc__, ("--store", {"type": Path}), ("--checkpoint-every", {"type": int}))
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    config = Config.from_args(args)
    batches = Batches(config)
    model = build_stage(rank, workers, config)
    stage = PipelineStage(model, rank, workers, torch.device("cpu"))
    schedule = Schedule1F1B(stage, config.microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    harness = Harness(args, rank, model)
    checkpointer = DdpCheckpointer(str(args.store), global_shard_num=workers)
    first = 0
    if loaded := checkpointer.load_checkpoint():
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        first = loaded["iteration"]
    for iteration in range(first, args.iterations):
        with harness.iteration(iteration):
            x, y = batches[iteration]
            schedule.step(*[x] if rank == 0 else [], target=y, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
        if (iteration + 1) % args.checkpoint_every == 0:
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state = {**parts, "iteration": iteration + 1}
            checkpointer.save_checkpoint(iteration + 1, state, storage_type=StorageType.DISK)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
