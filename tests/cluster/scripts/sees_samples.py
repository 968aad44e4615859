"""Data-parallel training whose weights say how often it has seen each sample, and where in the order."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import swift_ft
from tests.support.script import script_parser
from tests.support.waiting import wait_until

SAMPLES, BATCH = int(os.environ["SAMPLES"]), int(os.environ["BATCH"])


class Places(Dataset[int]):
    """Each sample is its index."""

    def __len__(self) -> int:
        return int(os.environ.get("LENGTH", SAMPLES))

    def __getitem__(self, index: int) -> int:
        return index


def samples_in_files(url: str, rank: int) -> Dataset[int]:
    """Each machine has a disk of its own, for copies."""
    return swift_ft.data.FileSamples(url, f"{os.environ['COPIES']}/{rank}", decode=int)


def work_on(samples: int, rank: int, iteration: int) -> None:
    """For each sample SAMPLE_MS, and five times that on the rank SLOW, in the iterations FROM to UNTIL."""
    slow = rank == int(os.environ.get("SLOW", -1))
    slow = slow and int(os.environ["FROM"]) <= iteration < int(os.environ["UNTIL"])
    time.sleep(samples * float(os.environ.get("SAMPLE_MS", 0)) / 1000 * (5 if slow else 1))


def keep_pace(iteration: int) -> None:
    """From each of the iterations GATES on, take a second for each one until the test is done with it."""
    passed = [gate for gate in map(int, os.environ.get("GATES", "").split()) if gate <= iteration]
    if passed:
        folder = Path(os.environ["SWIFT_TEST_FOLDER"])
        (folder / f"at-{passed[-1]}").touch()
        with contextlib.suppress(TimeoutError):
            wait_until((folder / f"done-{passed[-1]}").exists, "the test", deadline_s=1.0)


class Seen(nn.Module):
    """Plain SGD with a learning rate of 1 adds up, for each sample, what it was multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
        self.place = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def forward(self, samples: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return -(self.times[samples].sum() + (self.place[samples] * places).sum())


def main() -> None:
    args = script_parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Seen())
    optimizer = swift_ft.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    replicas, replica = dist.get_world_size(), dist.get_rank()
    weights = [1.0 + n for n in range(replicas)] if os.environ["UNLIKE"] == "1" else None
    url = os.environ.get("FILES")
    dataset = samples_in_files(url, replica) if url else Places()
    batches = swift_ft.data.GlobalBatches(
        dataset,
        BATCH,
        shuffle=True,
        seed=5,
        weights=weights,
        log=os.environ["SAMPLE_LOG"],
        num_workers=int(os.environ["LOADERS"]),
    )
    state = {"model": model, "optimizer": optimizer, "batches": batches}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_ddp(model)
    for step in session.steps(args.iterations):
        keep_pace(step.index)
        with step:
            samples = batches[step.index]
            start = step.index * BATCH + sum(batches.shares_at(step.index)[:replica])
            places = torch.arange(start, start + len(samples), dtype=torch.float64)
            assert math.isclose(batches.weight * BATCH, replicas * len(samples))
            work_on(len(samples), replica, step.index)
            (replicas * model(samples, places)).backward()
            optimizer.step()
            optimizer.zero_grad()
    out = Path(args.weights_out)
    out.mkdir(parents=True, exist_ok=True)
    torch.save(model.module.state_dict(), out / f"rank{replica}.pt")
    if isinstance(dataset, swift_ft.data.FileSamples):
        (out / f"fetched{replica}.json").write_text(json.dumps(asdict(dataset.copies.fetched)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
