"""A script that saves all that it has with ``torch.save`` after its loop: replicas, or a pipeline.

What pickle writes depends on which values are one object, and torch saves the whole memory of a tensor.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.mixed_state import Mixed

parser = argparse.ArgumentParser()
parser.add_argument("--store", required=True)
parser.add_argument("--iterations", type=int, default=8)
parser.add_argument("--pipeline", action="store_true")
args = parser.parse_args()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1))
if args.pipeline:
    layers = nn.Sequential(layers[0], nn.Tanh(), layers[2])
    model: nn.Module = layers
else:
    layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in its types
    model = DistributedDataParallel(layers)
groups: list[dict[str, Any]] = [
    {"params": [*layers[0].parameters()], "lr": 0.02},
    {"params": [*layers[2].parameters()]},
]
adam, averaged = torch.optim.Adam(groups), Mixed([*layers.parameters()])
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=1)
parts: dict[str, Any] = {"model": model, "adam": adam, "averaged": averaged, "scheduler": scheduler}
session = swift_ft.Session(parts, store=args.store, checkpoint_every=3)
schedule: Any = None
if args.pipeline:
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    session.attach_pipeline(schedule)
else:
    session.attach_ddp(model)
history: dict[str, Any] = {"loss": [], "best": {"mode": "min", "loss": None}, "shape": (0, "mean")}
for step in session.steps(args.iterations):
    with step:
        x = torch.linspace(-1, 1, 2 * 4 * 4 * 4).reshape(2, 4, 4, 4) * (step.index + 1)
        losses: list[torch.Tensor] = []
        if args.pipeline:
            schedule.step(*[x] if rank == 0 else [], target=x.square(), losses=losses)
            loss = sum(one.item() for one in losses) or 1 / (step.index + 1)
        else:
            error = (model(x * (rank + 1)) - x).square().mean()
            error.backward()
            error = error.detach()
            dist.all_reduce(error)
            loss = error.item()
        adam.step()
        averaged.step()
        model.zero_grad()
        scheduler.step(round(1 / (1 + step.index), 1))
        history["loss"].append(loss)
        history["mean"] = np.float64(sum(history["loss"]) / len(history["loss"]))
        history["best"] = {"mode": "min", "loss": min(history["loss"]), "step": step.index}
        history["shape"] = (step.index, "mean")
        history.setdefault(f"layer{step.index % 3}", {"loss": loss, "name": f"layer{step.index % 3}"})

out = Path(args.store).with_name("out")
out.mkdir(exist_ok=True)
values = {"model": model.state_dict(), "scheduler": scheduler.state_dict(), "history": history}
values |= {name: parts[name].state_dict() for name in ("adam", "averaged")}
for name, value in values.items():
    torch.save(value, out / f"{name}{rank}.pt")
torch.save([values, adam.param_groups, adam.defaults], out / f"all{rank}.pt")
dist.destroy_process_group()
