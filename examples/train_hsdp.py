"""Trains a GPT that FSDP2 shards within replicas (HSDP). A lost machine's shards come from the other replica.

swift-run --standalone --machines 4 --spares 1 examples/train_hsdp.py --store runs/hsdp
"""

from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Batches, Config, argument_parser, build_stage, loss_fn
from placement import add_device_options, join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import swift_ft


def main() -> None:
    """Trains one worker's shards."""
    parser = argument_parser(__doc__)
    add_device_options(parser)
    parser.add_argument("--store", default="runs/hsdp", help="a path or a URL, default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="default: %(default)s iterations")
    args = parser.parse_args()
    config = Config.from_args(args)

    device = join(args)
    rank, workers = dist.get_rank(), dist.get_world_size()
    model = build_stage(0, 1, config).to(device)
    mesh = init_device_mesh(device.type, (2, workers // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for block in (layer for name, layer in model.named_children() if name.startswith("block")):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), exact=True)
    batches = Batches(config, device)

    session = swift_ft.Session(
        {"model": model, "optimizer": optimizer}, store=args.store, checkpoint_every=args.checkpoint_every
    )
    session.attach_fsdp(model)
    for step in session.steps(args.iterations):
        with step:
            x, y = (part.chunk(workers)[rank] for part in batches[step.index])
            loss = loss_fn(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"iteration {step.index}: loss {loss.item():.3f}", flush=True)

    if args.weights_out:
        Path(args.weights_out).mkdir(parents=True, exist_ok=True)
        shards = {name: parameter.to_local() for name, parameter in model.state_dict().items()}
        torch.save(shards, f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
