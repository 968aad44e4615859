"""Trains in epochs with DDP: a loader, a function for an epoch, files of its own.

swift-run --standalone --machines 2 --spares 1 --inject "kill machine=1 iteration=12 point=reduce" \
    examples/train_epochs.py --store runs/epochs
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import swift_ft


def spirals(count: int, seed: int) -> TensorDataset:
    """Points of two spirals, and to which of them each belongs."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(2, (count,), generator=generator)
    turn = 3 * torch.rand(count, generator=generator)
    angle = 2 * turn + torch.pi * kind
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)
    return TensorDataset(points + 0.1 * torch.randn(count, 2, generator=generator), kind)


def loader_of(dataset: Dataset[Any]) -> DataLoader[Any]:
    """The part of the samples that is this replica's, in another order in each epoch."""
    return DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset), drop_last=True)


def train_one_epoch(
    epoch: int, session: Any, batches: Any, steps: int, model: nn.Module, optimizer: Any
) -> float:
    """Returns the mean loss of all replicas."""
    model.train()
    total = 0.0
    for step in session.steps(steps):
        with step:
            points, kind = batches[step.index]
            loss = F.cross_entropy(model(points), kind)
            optimizer.zero_grad()
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)  # a sum of what all replicas have alike is brought to a replacement
            optimizer.step()
            total += mean.item() / dist.get_world_size()
    return total / steps


def main() -> None:
    """Trains one replica."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--store", default="runs/epochs", help="a path or a URL, default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="default: %(default)s iterations")
    parser.add_argument(
        "--out", default="runs/epochs-out", help="the script's own files, default: %(default)s"
    )
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)))
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=0.02), exact=True)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.8)
    loader, held_out = loader_of(spirals(192, seed=1)), spirals(64, seed=2)
    batches = swift_ft.data.LoaderBatches(loader)

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_ddp(model)

    def validate() -> None:
        """After each epoch; done again by all workers if a machine is lost in it."""
        model.eval()
        points, kind = held_out[rank :: dist.get_world_size()]
        right = (model.module(points).argmax(1) == kind).float().mean()
        dist.all_reduce(right)
        if rank == 0:
            epoch = session.iteration // len(loader) - 1
            print(f"epoch {epoch}: {right.item() / dist.get_world_size():.2f} are right", flush=True)
            torch.save(model.module.state_dict(), out / f"epoch{epoch}.pt")

    session.between(validate, every=len(loader))
    for epoch in session.epochs(args.epochs):
        loss = train_one_epoch(epoch, session, batches, len(loader), model, optimizer)
        scheduler.step()
        print(f"[worker {rank}] epoch {epoch}: loss {loss:.3f}, next rate {scheduler.get_last_lr()[0]:.4f}")

    saved = {name: part.state_dict() for name, part in state.items()}
    torch.save({**saved, "rates": scheduler.get_last_lr()}, out / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
