"""Trains in epochs: a scheduler, an average, the best accuracy and a line in a file at the end of each.

Nested loops, or a function for an epoch, as in torch's examples. With "apart", the last two replicas
communicate alone after the update. With "memory", nothing is attached.

    epochs.py STORE nested|function [apart|memory|returns]
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import swift_ft
from tests.support.habits import leave

EPOCHS, STEPS = 4, 3
FORM, KIND = sys.argv[2], "".join(sys.argv[3:])


class AverageMeter:
    """As in torch's example for ImageNet."""

    def __init__(self, name: str) -> None:
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value: float) -> None:
        self.sum += value
        self.count += 1

    @property
    def avg(self) -> float:
        return self.sum / self.count


def train(
    rank: int, session: Any, batches: Any, model: Any, optimizer: Any, epoch: int
) -> tuple[float, float]:
    """One epoch."""
    model.train()
    device = torch.device("cpu", rank)  # of this rank's own
    losses, total = AverageMeter("loss"), 0.0
    loss_fn = nn.MSELoss()
    for step in session.steps(STEPS):
        with step:
            x, y = batches[step.index]
            loss = loss_fn(model(x), y) * (1 + epoch)
            optimizer.zero_grad()
            loss.backward()
            value = mean(loss)
            optimizer.step()
            talk_apart()
            losses.update(value)
            total += value
            step.once(write, rank, {"iteration": step.index, "epoch": epoch, "loss": value})
    assert device.index == rank, "a variable of this rank's own came from another one"
    assert losses.count == STEPS, f"epoch {epoch} has an average of {losses.count} steps"
    return losses.avg, total


apart: dist.ProcessGroup | None = None


def talk_apart() -> None:
    if apart is not None and dist.get_rank() >= 1:
        dist.all_reduce(torch.zeros(()), group=apart)


def mean(loss: torch.Tensor) -> float:
    """Of all replicas."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def write(rank: int, record: dict[str, Any]) -> None:
    with Path(os.environ["SWIFT_TEST_FOLDER"], f"log{rank}.jsonl").open("a") as file:
        print(json.dumps(record), file=file)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if KIND == "apart":
        global apart
        apart = dist.new_group([1, 2])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 1))
    model: Any = net if KIND == "memory" else DistributedDataParallel(net)
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), exact=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    data = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if KIND == "memory":
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    options: Any = {"memory": {"snapshot_every": 2}, "returns": {"checkpoint_every": 4}}.get(KIND, {})
    session = swift_ft.Session(state, store=sys.argv[1], **options)
    if KIND != "memory":
        session.attach_ddp(model)
    batches = swift_ft.data.IndexedBatches(
        data, batch_size=8, shuffle=True, drop_last=True, num_replicas=dist.get_world_size(), rank=rank
    )

    def save() -> None:
        epoch = session.iteration // STEPS - 1
        torch.save(
            [net.state_dict(), scheduler.state_dict()],
            Path(os.environ["SWIFT_TEST_FOLDER"], f"epoch{epoch}-{rank}.pt"),
        )

    session.between(save, every=STEPS)
    history: list[tuple[Any, ...]] = []
    best = float("inf")
    for epoch in session.epochs(EPOCHS):
        if FORM == "function":
            average, total = train(rank, session, batches, model, optimizer, epoch)
        else:
            meter, total, mine = AverageMeter("loss"), 0.0, rank
            for step in session.steps(STEPS):
                with step:
                    x, y = batches[step.index]
                    optimizer.zero_grad()
                    loss = nn.functional.mse_loss(model(x), y) * (1 + epoch)
                    loss.backward()
                    value = mean(loss)
                    optimizer.step()
                    talk_apart()
                    total += value
                    meter.update(value)
                    step.once(write, rank, {"iteration": step.index, "epoch": epoch, "loss": value})
            assert mine == rank, "a variable of this rank's own came from another one"
            assert meter.count == STEPS, f"epoch {epoch} has an average of {meter.count} steps"
            average = meter.avg
        scheduler.step()
        history.append((epoch, average, total, scheduler.get_last_lr()[0]))
        if average < best:
            best = average
            best_epoch = epoch
    assert [epoch for epoch, *_ in history] == [*range(EPOCHS)], history
    leave(
        rank,
        {
            "model": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "lr": scheduler.get_last_lr(),
            "best": (best, best_epoch),
            "history": history,
            "epochs": [
                torch.load(Path(os.environ["SWIFT_TEST_FOLDER"], f"epoch{e}-{rank}.pt"))
                for e in range(EPOCHS)
            ],
        },
    )


main()
