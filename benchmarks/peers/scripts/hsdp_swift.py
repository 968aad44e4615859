"""FSDP2 within two replicas (HSDP) under swift-run: a lost worker gets its state from a replica."""

import torch
import torch.distributed as dist
from gpt import Batches, Config, build_stage, loss_fn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import swift_ft
from benchmarks.peers.scripts.harness import Harness, parse_arguments


def main() -> None:
    """Trains one worker's shards."""
    args = parse_arguments(__doc__, ("--store", {}), ("--checkpoint-every", {"type": int}))
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
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), exact=True)
    harness = Harness(args, rank, model)
    state = {"model": model, "optimizer": optimizer}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_fsdp(model)
    for step in session.steps(args.iterations):
        with step, harness.iteration(step.index):
            x, y = (part.chunk(workers)[rank] for part in batches[step.index])
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
