"""Data parallelism in the ways in which people write it (HABIT).

``"accumulates"``: gradients of two microbatches, the first one without an average, with dropout and gradients
that are clipped. ``"logs"``: a loss that is averaged after the update, a mean of this replica's own losses,
and a file every few steps. ``"twice"``: two updates, the second one of what the first one has left.
``"counts"``: the loss is divided by a count that is summed over all replicas before. ``"frozen"``: BatchNorm
with statistics of the replica's own data, which stay as they are after two iterations.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import Batches, Config, build_stage, loss_fn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from swift_ft.config.worker_context import WorkerContext
from swift_ft.torch_adapters.versions.buffer_sync import BUFFER_SYNC
from tests.support.script import script_parser

FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])


def main() -> None:
    habit = os.environ["HABIT"]
    args = script_parser(__doc__).parse_args()
    config = Config.from_args(args)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    norm = nn.BatchNorm1d(config.sequence) if habit == "frozen" else nn.Dropout(0.1)
    own_buffers: Any = {BUFFER_SYNC: False} if habit == "frozen" else {}
    model = DistributedDataParallel(nn.Sequential(build_stage(0, 1, config), norm), **own_buffers)
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    batches = Batches(config)
    session = swift_ft.Session(
        {"model": model, "optimizer": optimizer}, store=args.store, checkpoint_every=args.checkpoint_every
    )
    session.attach_ddp(model)
    mean = 0.0
    for step in session.steps(args.iterations):
        with step:
            norm.train(habit != "frozen" or step.index < 2)
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
            if habit == "accumulates":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if habit == "logs":
                mean = 0.9 * mean + loss.item()
                dist.all_reduce(loss.detach())
                where = "audit" if WorkerContext.from_env().offline is not None else "run"
                (FOLDER / f"saved-by-{where}-{rank}").write_text(str(mean))
            if habit == "twice":
                loss_fn(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    Path(args.weights_out).mkdir(parents=True, exist_ok=True)
    torch.save(model.module.state_dict(), f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
