"""A LayerStack of small layers whose pipelines are made as the environment says."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from gpt import argument_parser
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import swift_ft

WIDTH = 4


def build_layer(number: int) -> nn.Module:
    normed = number == 1 and "NORM" in os.environ
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH) if normed else nn.Tanh())


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--store")
    parser.add_argument("--checkpoint-every", type=int)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    pipelines, tolerate = os.environ.get("PIPELINES"), int(os.environ.get("TOLERATE", 0))
    model = swift_ft.LayerStack(
        build_layer, 2, pipelines=None if pipelines is None else int(pipelines), tolerate=tolerate
    )
    stage = PipelineStage(model, model.stage, model.num_stages, torch.device("cpu"), group=model.group)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = swift_ft.Session(
        {"model": model, "optimizer": optimizer}, store=args.store, checkpoint_every=args.checkpoint_every
    )
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
