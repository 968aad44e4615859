"""Trains a small model that FSDP2, or tensor parallelism (HOW), has sharded over all workers.

After AT iterations each worker writes what it has of the state, and where that is in the whole.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import swift_ft
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.torch_core.shards import describe, local
from tests.support.script import script_parser

HOW, AT = os.environ["HOW"], int(os.environ["AT"])
WIDTH, BATCH = 24, 12


def sharded_model(world_size: int) -> nn.Module:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
    mesh = init_device_mesh("cpu", (world_size,))
    if HOW == "fsdp":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def write(state: TrainingState, path: Path) -> None:
    found = {}
    for name, tensor in state.named_tensors().items():
        box = describe(tensor)
        found[name] = (None if box is None else (box["shape"], box["offset"]), local(tensor).detach())
    torch.save(found, path)


def main() -> None:
    args = script_parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = sharded_model(world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parts = {"model": model, "optimizer": optimizer}
    local_disk = os.environ.get("LOCAL")
    session = swift_ft.Session(
        parts,
        store=args.store,
        checkpoint_every=args.checkpoint_every,
        snapshot_every=2,
        local=f"{local_disk}/machine-{rank}" if local_disk else None,
    )
    out = Path(args.weights_out)
    out.mkdir(parents=True, exist_ok=True)
    for step in session.steps(args.iterations):
        with step:
            if step.index == AT:
                write(TrainingState(parts), out / f"{world_size}-{rank}.pt")
            x, y = torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(step.index))
            if HOW == "fsdp":
                x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    if args.iterations == AT:
        write(TrainingState(parts), out / f"{world_size}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
