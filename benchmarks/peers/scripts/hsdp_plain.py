"""FSDP2 within two replicas (HSDP) in plain PyTorch: a lost worker ends the job."""

import torch
import torch.distributed as dist
from gpt import Batches, Config, build_stage, loss_fn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.peers.scripts.harness import Harness, parse_arguments


def main() -> None:
    """Trains one worker's shards."""
    args = parse_arguments(__doc__)
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
    for iteration in range(args.iterations):
        with harness.iteration(iteration):
            x, y = (part.chunk(workers)[rank] for part in batches[iteration])
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
