"""Trains a GPT with data parallelism, and with what real trainings do between their steps.

swift-run --standalone --machines 2 examples/train_habits.py --store runs/habits
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import Batches, Config, argument_parser, build_stage, loss_fn
from placement import add_device_options, join
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

import swift_ft


class Best:
    """The smallest validation loss so far."""

    def __init__(self) -> None:
        self.loss, self.improved, self.worse_in_a_row = float("inf"), False, 0

    def update(self, loss: float) -> None:
        """There is another one."""
        self.improved = loss < self.loss
        self.loss = min(loss, self.loss)
        self.worse_in_a_row = 0 if self.improved else self.worse_in_a_row + 1

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        vars(self).update(state)


def main() -> None:
    """Trains one worker's replica."""
    parser = argument_parser(__doc__)
    add_device_options(parser)
    parser.add_argument("--store", default="runs/habits", help="a path or a URL, default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="default: %(default)s iterations")
    parser.add_argument("--validate-every", type=int, default=10, help="default: %(default)s iterations")
    parser.add_argument("--own", default="runs/own", help="the script's own files, default: %(default)s")
    args = parser.parse_args()
    config = Config.from_args(args)

    device = join(args)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(build_stage(0, 1, config).to(device))
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    plateau = ReduceLROnPlateau(optimizer)
    best, batches = Best(), Batches(config, device)
    last_loss = torch.zeros(())
    Path(args.own).mkdir(parents=True, exist_ok=True)

    state = {"model": model, "optimizer": optimizer, "plateau": plateau, "best": best}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_ddp(model)

    def validate() -> float:
        """The mean loss of data that no step has."""
        model.eval()
        x, y = (part.chunk(world_size)[rank] for part in batches[100_000])
        with torch.no_grad():
            loss = loss_fn(model.module(x), y)
        dist.all_reduce(loss)
        return loss.item() / world_size

    def judge(loss: float) -> None:
        """What follows from it for the training, in a replay too."""
        plateau.step(loss)
        best.update(loss)
        if best.worse_in_a_row >= 3:
            session.stop()

    def save_best() -> None:
        if best.improved and rank == 0:
            torch.save(model.module.state_dict(), f"{args.own}/best.pt")

    def save() -> None:
        dcp.save({"model": model.module.state_dict()}, checkpoint_id=f"{args.own}/{session.iteration}")

    def log() -> None:
        mean = last_loss / world_size
        dist.all_reduce(mean)
        if rank == 0:
            print(f"iteration {session.iteration - 1}: loss {mean.item():.3f}", flush=True)

    session.between(validate, every=args.validate_every, then=judge)
    session.between(save_best, every=args.validate_every)
    session.between(save, every=2 * args.validate_every)
    session.between(log, every=5, on_loss="skip")

    for step in session.steps(args.iterations):
        with step:
            x, y = (part.chunk(world_size)[rank] for part in batches[step.index])
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            last_loss = loss.detach()

    if args.weights_out:
        Path(args.weights_out).mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
