"""Trains a GPT with data parallelism. A machine that dies is replaced; its state comes from a replica.

swift-run --standalone --machines 2 examples/train_ddp.py --store runs/ddp
"""

from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Batches, Config, argument_parser, build_stage, loss_fn
from placement import add_device_options, join
from torch.nn.parallel import DistributedDataParallel

import swift_ft


def main() -> None:
    """Trains one worker's replica."""
    parser = argument_parser(__doc__)
    add_device_options(parser)
    parser.add_argument("--store", default="runs/ddp", help="a path or a URL, default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="default: %(default)s iterations")
    parser.add_argument("--optimizer", choices=["AdamW", "SGD"], default="AdamW", help="default: %(default)s")
    parser.add_argument(
        "--wait-free", action="store_true", help="update each bucket as soon as it is reduced"
    )
    parser.add_argument("--exact", action="store_true", help="keep what makes an undo bit-exact")
    parser.add_argument("--bucket-mb", type=float, default=25, help="default: %(default)s")
    args = parser.parse_args()
    config = Config.from_args(args)

    device = join(args)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(build_stage(0, 1, config).to(device), bucket_cap_mb=args.bucket_mb)
    momentum = {"momentum": 0.9} if args.optimizer == "SGD" else {}
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=1e-3, **momentum)
    optimizer = swift_ft.wrap_optimizer(optimizer, exact=args.exact, wait_free=args.wait_free)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=args.iterations)
    batches = Batches(config, device)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_ddp(model)
    for step in session.steps(args.iterations):
        with step:
            x, y = (part.chunk(world_size)[rank] for part in batches[step.index])
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"iteration {step.index}: loss {loss.item():.3f}", flush=True)

    if args.weights_out:
        Path(args.weights_out).mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
