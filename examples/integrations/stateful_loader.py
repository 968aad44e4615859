"""Trains a CNN on a stream of pictures that torchdata's StatefulDataLoader reads.

swift-run --standalone --machines 2 --spares 1 --inject "kill machine=1 iteration=12" \
    examples/integrations/stateful_loader.py --store runs/stream
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shapes import Shapes, build_cnn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import swift_ft


class Stream(IterableDataset[tuple[Tensor, int]]):
    """Every n-th picture, read one after the other, from wherever the last reader was.

    Args:
        rank: of the worker that reads.
        world_size: the workers among which the pictures are divided.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._pictures = Shapes()
        self._rank, self._world_size = rank, world_size
        self._next = rank

    def __len__(self) -> int:
        return len(range(self._rank, len(self._pictures), self._world_size))

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        while self._next < len(self._pictures):
            self._next += self._world_size
            yield self._pictures[self._next - self._world_size]
        self._next = self._rank  # the next epoch begins there

    def state_dict(self) -> dict[str, Any]:
        """For StatefulDataLoader: the picture that comes next."""
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._next = state["next"]


def main() -> None:
    """Trains one replica."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--store", default="runs/stream", help="a path or a URL, default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="default: %(default)s iterations")
    parser.add_argument("--out", help="write the final state as OUT/rank<r>.pt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(build_cnn())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = StatefulDataLoader(Stream(rank, world_size), batch_size=12, num_workers=1)
    batches = swift_ft.data.LoaderBatches(loader)

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "batches": batches}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_ddp(model)
    for step in session.steps(args.iterations):
        with step:
            images, labels = batches[step.index]
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"iteration {step.index}: loss {loss.item():.3f}", flush=True)

    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, f"{args.out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
