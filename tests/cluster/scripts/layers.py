"""A stack of layers, with the habits that a test asks for: optimizers, groups, schedules, averages, clipping.

``HABITS``, separated by commas. ``PIPELINES``: that are replicas. ``DIES`` is the rank of a worker that kills
itself in the first step after the layers have moved, once. ``LOCAL`` is where machines have their own disks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import Batches, Config, build_layer, loss_fn
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import swift_ft
from swift_ft.optim import Lamb
from tests.support.script import script_parser

HABITS = {*filter(None, os.environ.get("HABITS", "").split(","))}
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
PIPELINES = int(os.environ.get("PIPELINES", "1"))
CHANGES_AT = 3
"""The iteration from which habits "at 3" do something else."""
EPOCH = 4
"""Iterations."""


def optimizers_of(model: nn.Module, layers: tuple[int, ...]) -> dict[str, torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    if "sgd" in HABITS:
        return {"optimizer": torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)}
    if "lamb" in HABITS:
        return {"optimizer": Lamb(model.parameters(), lr=1e-3)}
    if "muon" in HABITS:
        return {"muon": torch.optim.Muon(matrices, lr=1e-2), "rest": torch.optim.AdamW(others, lr=1e-3)}
    if "layer rates" in HABITS:
        rates = [{"params": model.get_submodule(str(n)).parameters(), "lr": 1e-3 * 0.9**n} for n in layers]
        return {"optimizer": torch.optim.AdamW(rates)}
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 2e-3},
    ]
    chosen = torch.optim.AdamW(groups if "groups" in HABITS else model.parameters(), lr=1e-3)
    return {"optimizer": swift_ft.wrap_optimizer(chosen) if "wrapped" in HABITS else chosen}


def die_once(rank: int) -> None:
    marker = FOLDER / "died"
    if os.environ.get("DIES") == str(rank) and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Scaled(nn.Module):
    """A layer whose output is scaled, by an attribute that may change as it trains."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.by = inner, 1.0

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.inner(x) * self.by
        return scaled


class Loaded(nn.Module):
    """A layer that keeps what it is given, in a buffer and in an attribute: each pipeline has its own."""

    load: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.seen = inner, list[float]()
        self.register_buffer("load", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean = x.detach().float().mean()
            self.load += mean
            self.seen.append(mean.item())
        output: Tensor = self.inner(x)
        return output


def change(model: swift_ft.LayerStack) -> None:
    """What a script may do to its layers at some iteration, beside their tensors."""
    if "thaws at 3" in HABITS:
        model.requires_grad_(True)
    for number in model.layers:
        layer = model.layer(number)
        if isinstance(layer, Scaled):
            layer.by = 0.9
        if "eval at 3" in HABITS and number % 2:
            layer.eval()


def steps_of(session: swift_ft.Session, iterations: int) -> Iterator[swift_ft.Step]:
    if "epochs" not in HABITS:
        yield from session.steps(iterations)
        return
    for _ in session.epochs(-(-iterations // EPOCH)):
        yield from session.steps(EPOCH)


def main() -> None:
    args = script_parser(__doc__).parse_args()
    config = Config.from_args(args)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def build(number: int) -> nn.Module:
        layer = build_layer(number, config)
        if "tied" in HABITS and number == config.layers + 1:
            layer.get_parameter("logits.weight").data = (
                build_layer(0, config).get_parameter("token.weight").data
            )
        if "thaws at 3" in HABITS:
            layer.requires_grad_(number % 2 == 0)
        if "loads" in HABITS:
            return Loaded(layer)
        return Scaled(layer) if "scales at 3" in HABITS else layer

    model = swift_ft.LayerStack(build, count=config.layers + 2, pipelines=PIPELINES)
    module = nn.Sequential(model) if "inside" in HABITS else model
    stage = PipelineStage(module, model.stage, model.num_stages, torch.device("cpu"), group=model.group)
    if "frozen" in HABITS:  # by the script, and not by build_layer
        for number in model.layers:
            first = next(model.layer(number).parameters())
            first.requires_grad_(number % 2 == 0)
    optimizers = optimizers_of(model, model.layers)
    state: dict[str, Any] = {"model": model, **optimizers}
    scheduled = [one for one in optimizers.values() if "no scheduler" not in HABITS]
    schedulers = [LambdaLR(one, lambda at: 1 / (1 + at)) for one in scheduled]
    state |= {f"scheduler {i}": one for i, one in enumerate(schedulers)}
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in HABITS, growth_interval=3, init_scale=8.0)
    if "scaler" in HABITS:
        state["scaler"] = scaler
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if "average" in HABITS else None
    if average is not None:
        state["average"] = average

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = scaler.scale(loss_fn(logits, targets)) * factor
        return loss

    schedule = Schedule1F1B(stage, config.microbatches, loss_fn=loss_of)
    batches = Batches(config)
    local = os.environ.get("LOCAL")
    session = swift_ft.Session(
        state,
        store=args.store,
        checkpoint_every=args.checkpoint_every,
        local=f"{local}/machine-{rank}" if local else None,
    )
    session.attach_pipeline(schedule)
    if "tied" in HABITS:
        session.tie_layers(f"{config.layers + 1}.logits.weight", "0.token.weight")
    begun_with, factor = model.layers, 1.0
    for step in steps_of(session, args.iterations):
        with step:
            x, y = batches[step.index * PIPELINES + model.pipeline]
            if step.index == CHANGES_AT:
                factor = 0.5 if "halves at 3" in HABITS else 1.0
                change(model)
            scaler.scale(torch.zeros(()))  # all stages have a scale, and the last one uses it
            for _ in range(1 + ("twice" in HABITS)):
                schedule.step(*[x] if model.stage == 0 else [], target=y, return_outputs=False)
            if model.layers != begun_with and not step.replayed:
                die_once(rank)
            if "tied" in HABITS:
                session.sum_tied_gradients()
            for optimizer in optimizers.values():
                scaler.unscale_(optimizer)
            if "clip" in HABITS:
                model.clip_grad_norm_(0.5)
            for optimizer in optimizers.values():
                scaler.step(optimizer)
                optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
            scaler.update()
            if average is not None:
                average.update_parameters(model)

    Path(args.weights_out).mkdir(parents=True, exist_ok=True)
    saved = model.state_dict()
    if average is not None:
        saved |= {f"average.{name}": tensor for name, tensor in average.module.state_dict().items()}
        saved[f"average.count of stage {model.stage}"] = average.n_averaged
    for number in model.layers:
        if isinstance(layer := model.layer(number), Loaded):
            saved[f"{number}.seen"] = torch.tensor(layer.seen, dtype=torch.float64)
    torch.save(saved, f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
