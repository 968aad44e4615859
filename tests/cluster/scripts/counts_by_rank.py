"""Replicas (DDP) whose scripts each count something of their own, in each step: an example of ``EXAMPLE``."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.script import script_parser


def main() -> None:
    args = script_parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    rank, seen_by_me = dist.get_rank(), 0
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = swift_ft.Session(
        {"model": model, "optimizer": optimizer}, store=args.store, checkpoint_every=args.checkpoint_every
    )
    session.attach_ddp(model)
    for step in session.steps(args.iterations):
        with step:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step.index + rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen_by_me += rank + 1

    Path(args.weights_out).mkdir(parents=True, exist_ok=True)
    state = {**model.module.state_dict(), "seen": torch.tensor(seen_by_me)}
    torch.save(state, f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
