"""Trains a GPT that FSDP2 shards over all workers. A lost machine's shards come from another one's memory.

swift-run --standalone --machines 4 --spares 1 examples/train_fsdp.py --store runs/fsdp
"""

from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Batches, Config, argument_parser, build_stage, loss_fn
from placement import add_device_options, join
from torch.distributed.fsdp import fully_shard

import swift_ft


def main() -> None:
    """Trains one worker's shards."""
    parser = argument_parser(__doc__)
    add_device_options(parser)
    parser.add_argument("--store", default="runs/fsdp", help="a path or a URL, default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="default: %(default)s iterations")
    parser.add_argument("--snapshot-every", type=int, default=10, help="default: %(default)s iterations")
    args = parser.parse_args()
    config = Config.from_args(args)

    device = join(args)
    rank, workers = dist.get_rank(), dist.get_world_size()
    model = build_stage(0, 1, config).to(device)
    for block in (layer for name, layer in model.named_children() if name.startswith("block")):
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(config, device)

    state = {"model": model, "optimizer": optimizer}
    session = swift_ft.Session(
        state, store=args.store, snapshot_every=args.snapshot_every, checkpoint_every=args.checkpoint_every
    )
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
