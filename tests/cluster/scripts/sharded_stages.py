"""The example training with FSDP2 inside its stages: each stage is sharded over some workers."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import Batches, Config, build_stage, loss_fn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import swift_ft
from tests.support.script import script_parser


def drop_some(x: torch.Tensor) -> torch.Tensor:
    """Uses the random state, which depends on the worker: each shard has other data."""
    return torch.nn.functional.dropout(x, 0.1) if x.is_floating_point() else x


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--shards", type=int, default=2, help="workers of a stage")
    parser.add_argument("--replicas", type=int, default=1, help="of each shard of a stage (HSDP)")
    parser.add_argument("--reshard", default="yes")
    args = parser.parse_args()
    config = Config.from_args(args)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = size // args.shards // args.replicas, args.replicas, args.shards
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    index, replica, shard = (mesh.get_local_rank(name) for name in ("pp", "dp_replicate", "dp_shard"))
    module = build_stage(index, shape[0], config)
    over = mesh["dp_replicate", "dp_shard"] if args.replicas > 1 else mesh["dp_shard"]
    options: dict[str, Any] = {"mesh": over, "reshard_after_forward": args.reshard == "yes"}
    for block in module.modules():
        if type(block).__name__ == "Block":
            fully_shard(block, **options)
    fully_shard(module, **options)
    module.register_forward_pre_hook(lambda _, args: tuple(drop_some(x) for x in args))
    stage = PipelineStage(module, index, shape[0], torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, config.microbatches, loss_fn=loss_fn)
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(module.parameters(), lr=1e-3), exact=True)
    batches = Batches(config)

    state = {"model": module, "optimizer": optimizer}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_pipeline(schedule)
    if args.replicas > 1:
        session.attach_fsdp(module)
    for step in session.steps(args.iterations):
        with step:
            losses: list[torch.Tensor] = []
            x, y = batches[(step.index * args.replicas + replica) * args.shards + shard]
            schedule.step(*[x] if index == 0 else [], target=y, losses=losses, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()

    Path(args.weights_out).mkdir(parents=True, exist_ok=True)
    shards = {name: tensor.to_local().clone() for name, tensor in module.state_dict().items()}
    torch.save(shards, f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
