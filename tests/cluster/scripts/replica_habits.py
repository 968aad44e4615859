"""Data parallelism in the ways in which people write it (HABIT).

``"accumulates"``: gradients of two microbatches, the first one without an average, with dropout and gradients
that are clipped. ``"logs"``: a loss that is averaged after the backward pass. ``"twice"``: two updates, the
second one of what the first one has left. ``"counts"``: the loss is divided by a count that is summed over
all replicas before.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Batches, Config, argument_parser, build_stage, loss_fn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft


def main() -> None:
    habit = os.environ["HABIT"]
    parser = argument_parser(__doc__)
    parser.add_argument("--store")
    parser.add_argument("--checkpoint-every", type=int)
    args = parser.parse_args()
    config = Config.from_args(args)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(nn.Sequential(build_stage(0, 1, config), nn.Dropout(0.1)))
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    batches = Batches(config)
    session = swift_ft.Session(
        {"model": model, "optimizer": optimizer}, store=args.store, checkpoint_every=args.checkpoint_every
    )
    session.attach_ddp(model)
    for step in session.steps(args.iterations):
        with step:
            x, y = (part.chunk(world_size)[rank] for part in batches[step.index])
            count = torch.tensor(1.0 + y.numel())
            if habit == "counts":
                dist.all_reduce(count)
            if habit == "accumulates":
                with model.no_sync():
                    loss_fn(model(x[:1]), y[:1]).backward()
                x, y = x[1:], y[1:]
            loss = loss_fn(model(x), y) / count
            loss.backward()
            if habit == "logs":
                dist.all_reduce(loss.detach())
            if habit == "accumulates":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if habit == "twice":
                loss_fn(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    Path(args.weights_out).mkdir(parents=True, exist_ok=True)
    torch.save(model.module.state_dict(), f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
