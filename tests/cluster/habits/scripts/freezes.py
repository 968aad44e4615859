"""Data-parallel trainings that freeze and thaw parameters after DDP was made, or have sparse gradients.

``plain FOLDER HABIT ...`` runs some habits one after the other without a session, as under torchrun.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.habits import leave

ITERATIONS, THAWED = 8, 3


class Classifier(nn.Module):
    """A backbone and a head; with ``sparse``, words go in."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8, sparse=True) if sparse else None
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.words is not None:
            x = self.words((x.abs() * 7).long().clamp(max=15)).mean(1)
        out: Tensor = self.head(self.backbone(x))
        return out


class Both(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, real: Tensor | None, noise: Tensor) -> Tensor:
        fake = self.generator(noise)
        judged: Tensor = self.discriminator(fake if real is None else fake.detach()).mean()
        return -judged if real is None else judged - self.discriminator(real).mean()


def wrapped(parameters: Any) -> Any:
    return swift_ft.wrap_optimizer(torch.optim.SGD(parameters, lr=0.1), exact=True)


def build(habit: str) -> tuple[DistributedDataParallel, list[Any], Callable[[int], None]]:
    """The model, its optimizers and a step of them."""
    torch.manual_seed(0)
    rank, workers = dist.get_rank(), dist.get_world_size()
    inner: Any = Both() if habit == "gan" else Classifier(habit == "sparse")
    if habit == "frozen before":
        inner.backbone.requires_grad_(False)
    unused = habit in ("frozen after", "gan")
    model = DistributedDataParallel(inner, bucket_cap_mb=0.0005, find_unused_parameters=unused)
    if habit == "frozen after":
        inner.backbone.requires_grad_(False)
    parts = [inner.discriminator, inner.generator] if habit == "gan" else [inner]
    optimizers = [wrapped(part.parameters()) for part in parts]
    seen: dict[str, Any] = {}

    def train(index: int) -> None:
        data = torch.Generator().manual_seed(workers * index + rank)
        x, noise = torch.randn(6, 8, generator=data), torch.randn(6, 8, generator=data)
        if habit != "gan":
            if "frozen" in habit:
                inner.backbone.requires_grad_(index >= THAWED)
            optimizers[0].zero_grad()
            model(x).square().mean().backward()
            optimizers[0].step()
            seen["gradient"] = next(inner.parameters()).grad
            return
        inner.discriminator.requires_grad_(True)
        optimizers[0].zero_grad()
        model(x, noise).backward()
        optimizers[0].step()
        inner.discriminator.requires_grad_(False)
        optimizers[1].zero_grad()
        model(None, noise).backward()
        optimizers[1].step()

    return model, optimizers, train


def results(model: DistributedDataParallel) -> dict[str, Any]:
    inner = model.module
    return {"model": inner.state_dict(), "trained": [p.requires_grad for p in inner.parameters()]}


def run_plain(folder: Path, habit: str) -> None:
    model, _, train = build(habit)
    for index in range(ITERATIONS):
        train(index)
    folder.mkdir(exist_ok=True)
    os.environ["SWIFT_TEST_FOLDER"] = str(folder)
    leave(dist.get_rank(), results(model))


def run(store: str, habit: str, verify: str = "digest") -> None:
    model, optimizers, train = build(habit)
    state = {"model": model, **{f"optimizer {n}": optimizer for n, optimizer in enumerate(optimizers)}}
    session = swift_ft.Session(state, store=store, checkpoint_every=4, verify=verify)
    session.attach_ddp(model)
    for step in session.steps(ITERATIONS):
        with step:
            train(step.index)
    leave(dist.get_rank(), results(model))


dist.init_process_group("gloo")
if sys.argv[1] == "plain":
    for name in sys.argv[3:]:
        run_plain(Path(sys.argv[2]) / name, name)
else:
    run(*sys.argv[1:])
dist.destroy_process_group()
