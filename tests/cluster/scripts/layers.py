"""A stack of layers, with the habits that a test asks for: optimizers, groups, schedules, averages, clipping.

``HABITS``, separated by commas. ``DIES`` is the rank of a worker that kills itself in the first step after
the layers have moved, once. ``LOCAL`` is where machines have their own disks.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import Batches, Config, argument_parser, build_layer, loss_fn
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import swift_ft
from swift_ft.optim import Lamb

HABITS = {*filter(None, os.environ.get("HABITS", "").split(","))}
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])


def optimizers_of(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    if "sgd" in HABITS:
        return {"optimizer": torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)}
    if "lamb" in HABITS:
        return {"optimizer": Lamb(model.parameters(), lr=1e-3)}
    if "muon" in HABITS:
        return {"muon": torch.optim.Muon(matrices, lr=1e-2), "rest": torch.optim.AdamW(others, lr=1e-3)}
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


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--store")
    parser.add_argument("--checkpoint-every", type=int)
    args = parser.parse_args()
    config = Config.from_args(args)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def build(number: int) -> nn.Module:
        layer = build_layer(number, config)
        if "tied" in HABITS and number == config.layers + 1:
            layer.get_parameter("logits.weight").data = (
                build_layer(0, config).get_parameter("token.weight").data
            )
        return layer

    model = swift_ft.LayerStack(build, count=config.layers + 2)
    module = nn.Sequential(model) if "inside" in HABITS else model
    stage = PipelineStage(module, model.stage, model.num_stages, torch.device("cpu"), group=model.group)
    optimizers = optimizers_of(model)
    state: dict[str, Any] = {"model": model, **optimizers}
    schedulers = [LambdaLR(one, lambda at: 1 / (1 + at)) for one in optimizers.values()]
    state |= {f"scheduler {i}": one for i, one in enumerate(schedulers)}
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in HABITS, growth_interval=3, init_scale=8.0)
    if "scaler" in HABITS:
        state["scaler"] = scaler
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if "average" in HABITS else None
    if average is not None:
        state["average"] = average

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = scaler.scale(loss_fn(logits, targets))
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
    begun_with = model.layers
    for step in session.steps(args.iterations):
        with step:
            x, y = batches[step.index]
            scaler.scale(torch.zeros(()))  # all stages have a scale, and the last one uses it
            for _ in range(1 + ("twice" in HABITS)):
                schedule.step(*[x] if rank == 0 else [], target=y, return_outputs=False)
            if model.layers != begun_with and not step.replayed:
                die_once(rank)
            if "tied" in HABITS:
                session.sum_tied_gradients()
            for optimizer in optimizers.values():
                scaler.unscale_(optimizer)
            if "clip" in HABITS:
                model.clip_grad_norm_(0.5)
            for optimizer, scheduler in zip(optimizers.values(), schedulers, strict=True):
                scaler.step(optimizer)
                optimizer.zero_grad()
                scheduler.step()
            scaler.update()
            if average is not None:
                average.update_parameters(model)

    Path(args.weights_out).mkdir(parents=True, exist_ok=True)
    saved = model.state_dict()
    if average is not None:
        saved |= {f"average.{name}": tensor for name, tensor in average.module.state_dict().items()}
    torch.save(saved, f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
