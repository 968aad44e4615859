"""A LayerStack of small layers whose pipelines are made as the environment says."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.script import script_parser

WIDTH = 4
NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm1d(WIDTH),
    "lazy": nn.LazyBatchNorm1d,
    "instance": lambda: nn.InstanceNorm1d(WIDTH, track_running_stats=True),
}


def build_layer(number: int) -> nn.Module:
    norm = NORMS.get(os.environ.get("NORM", "")) if number == 1 else None
    made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh() if norm is None else norm())
    if "SHARDED" in os.environ:
        fully_shard(made)
        return made
    return DistributedDataParallel(made) if "WRAPPED" in os.environ and number == 0 else made


def main() -> None:
    args = script_parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    pipelines, tolerate = os.environ.get("PIPELINES"), int(os.environ.get("TOLERATE", 0))
    model = swift_ft.LayerStack(
        build_layer,
        2,
        pipelines=None if pipelines is None else int(pipelines),
        tolerate=tolerate,
        group=[dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        if "ALONE" in os.environ
        else None,
        stages_per_worker=2 if "PARTS" in os.environ else 1,
    )
    module: Any = model.parts[0]
    if os.environ.get("PARTS") == "in place":
        module.compile(backend="eager")
    elif "PARTS" in os.environ:
        module = torch.compile(module, backend="eager")
    stage = PipelineStage(module, model.stages[0], model.num_stages, torch.device("cpu"), group=model.group)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = swift_ft.Session(
        {"model": model, "optimizer": optimizer},
        store=args.store,
        checkpoint_every=args.checkpoint_every,
        snapshot_every=1 if "UNATTACHED" in os.environ else None,
    )
    if "UNATTACHED" not in os.environ:
        session.attach_pipeline(schedule)
    for step in session.steps(args.iterations):
        with step:
            for _ in range(1 + ("TWICE" in os.environ)):
                schedule.step(torch.ones(4, WIDTH), target=torch.zeros(4, WIDTH))
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
