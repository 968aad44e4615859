"""Data parallel under swift-run: without a spare, those that are left share the global batches."""

import torch
import torch.distributed as dist
from gpt import Batches, Config, build_stage, loss_fn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import swift_ft
from benchmarks.peers.scripts.harness import Harness, parse_arguments


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """The samples of all batches, one after the other."""

    def __init__(self, batches: Batches, batch_size: int) -> None:
        self._batches = batches
        self._batch_size = batch_size

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self._batches[index // self._batch_size]
        return x[index % self._batch_size], y[index % self._batch_size]


def main() -> None:
    """Trains one worker's replica."""
    args = parse_arguments(__doc__, ("--store", {}), ("--checkpoint-every", {"type": int}))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    config = Config.from_args(args)
    batch_size = config.microbatches * config.microbatch_size
    batches = swift_ft.data.GlobalBatches(Samples(Batches(config), batch_size), batch_size)
    model = DistributedDataParallel(build_stage(0, 1, config))
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    harness = Harness(args, rank, model)
    state = {"model": model, "optimizer": optimizer, "batches": batches}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_ddp(model)
    for step in session.steps(args.iterations):
        with step, harness.iteration(step.index):
            x, y = batches[step.index]
            (batches.weight * loss_fn(model(x), y)).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
