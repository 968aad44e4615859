"""FSDP2 within two replicas (HSDP) under torchrun: all workers start again from the newest DCP checkpoint."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import Batches, Config, build_stage, loss_fn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.peers.scripts.harness import Harness, parse_arguments


def main() -> None:
    """Trains one worker's shards."""
    args = parse_arguments(__doc__, ("--store", {"type": Path}), ("--checkpoint-every", {"type": int}))
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    config = Config.from_args(args)
    batches = Batches(config)
    model = build_stage(0, 1, config)
    mesh = init_device_mesh("cpu", (2, workers // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for name, layer in model.named_children():
        if name.startswith("block"):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    harness = Harness(args, rank, model)
    first = 0
    if committed := sorted(args.store.glob("*/.metadata")):
        loaded = state_of(model, optimizer, 0)
        dcp.load(loaded, checkpoint_id=committed[-1].parent)
        set_state_dict(
            model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
        first = loaded["iteration"]
    for iteration in range(first, args.iterations):
        with harness.iteration(iteration):
            x, y = (part.chunk(workers)[rank] for part in batches[iteration])
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if (iteration + 1) % args.checkpoint_every == 0:
            state = state_of(model, optimizer, iteration + 1)
            dcp.save(state, checkpoint_id=args.store / f"{iteration + 1:08d}")
    dist.destroy_process_group()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, iteration: int) -> dict[str, Any]:
    """Everything that a checkpoint holds."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "iteration": iteration}


if __name__ == "__main__":
    main()
