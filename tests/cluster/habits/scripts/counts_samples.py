"""Replicas, or the stages of a pipeline, whose loader holds objects of the script that change.

counts_samples.py STORE HABIT [pipeline]
"""

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, Subset

import swift_ft
from tests.support.habits import attach, leave

STORE, HABIT = sys.argv[1:3]
PIPELINE = sys.argv[3:] == ["pipeline"]
SAMPLES, BATCH = 24, 4
OF_LOADER = ["a level", "a level by processes, from an epoch on", "a level by processes, within an epoch"]
CHANGES_AT = SAMPLES // BATCH if HABIT.endswith("from an epoch on") else 3


def sample(index: int) -> Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(100 * (0 if PIPELINE else rank) + index))


class Stream(IterableDataset[Tensor]):
    """As torchdata shows it: it goes on from where the last reader was."""

    def __init__(self) -> None:
        self.place = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[Tensor]:
        while self.place < SAMPLES:
            self.place += 1
            yield sample(self.place - 1)
        self.place = 0


class Shuffled(Stream):
    """Samples wait in a buffer, from which they are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer: list[Tensor] = []
        self.drawn = random.Random(5)

    def __iter__(self) -> Iterator[Tensor]:
        self.drawn.seed(5)
        for one in super().__iter__():
            self.buffer.append(one)
            if len(self.buffer) == 6:
                yield self.buffer.pop(self.drawn.randrange(6))
        while self.buffer:
            yield self.buffer.pop()


class Samples(Dataset[Tensor]):
    def __init__(self) -> None:
        self.level = 1.0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return sample(index) * self.level


class InTurn(Sampler[int]):
    """It counts, as a sampler does that can be resumed."""

    def __init__(self) -> None:
        self.place = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        while self.place < SAMPLES:
            self.place += 1
            yield SAMPLES - self.place
        self.place = 0


class Weighted:
    """Makes batches, each of an epoch with another weight."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[Tensor]) -> Tensor:
        self.calls += 1
        return torch.stack(samples) * (self.calls % (SAMPLES // BATCH))


def behind_others(*, processes: bool = False) -> Any:
    """What leads to the data set is no variable of the loop."""
    dataset: Any = ConcatDataset([Subset(Samples(), range(SAMPLES))])
    return DataLoader(dataset, BATCH, num_workers=int(processes))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank if PIPELINE else 0)
net = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
model: nn.Module = net if PIPELINE else DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
if HABIT == "a stream":
    data = Stream()
    batches: Any = swift_ft.data.LoaderBatches(DataLoader(data, BATCH))
elif HABIT == "a buffer":
    data = Shuffled()
    batches = swift_ft.data.LoaderBatches(DataLoader(data, BATCH))
elif HABIT == "a sampler":
    batches = swift_ft.data.LoaderBatches(DataLoader(Samples(), BATCH, sampler=InTurn()))
elif HABIT == "a function for batches":
    weighted = Weighted()
    batches = swift_ft.data.LoaderBatches(DataLoader(Samples(), BATCH, collate_fn=weighted))
elif HABIT in OF_LOADER:
    batches = swift_ft.data.LoaderBatches(behind_others(processes="processes" in HABIT))
elif "globally" in HABIT:
    batches = swift_ft.data.GlobalBatches(
        behind_others().dataset, BATCH, replicas=1, num_workers=int("processes" in HABIT)
    )
else:
    batches = swift_ft.data.IndexedBatches(
        behind_others().dataset,
        BATCH,
        sampler=range(SAMPLES),  # type: ignore[arg-type]
        num_workers=int("processes" in HABIT),
    )
session = swift_ft.Session({"model": model, "optimizer": optimizer}, store=STORE, checkpoint_every=3)
schedule = attach(session, model, pipeline=PIPELINE)


def inner() -> Samples:
    outer = batches._loader.dataset if HABIT in OF_LOADER else batches._source._dataset._dataset
    found: Samples = outer.datasets[0].dataset
    return found


for step in session.steps(10):
    with step:
        level = 1.0
        if "level" in HABIT:
            if step.index == CHANGES_AT:
                inner().level = 2.0
            level = inner().level
        x = batches[step.index]
        if PIPELINE:
            schedule.step(*[x] if rank == 0 else [], target=x * level)
        else:
            (model(x) - level).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
leave(rank, {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
dist.destroy_process_group()
