"""Pipelines of a LayerStack that share global batches: each gets as many microbatches as it can take."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import ONE_STAGE, Config, build_layer, loss_fn
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils.data import Dataset

import swift_ft
from tests.support.script import script_parser

SAMPLES, SAMPLES_OF_MICROBATCH, PLANNED_AT = 400, 2, 11


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Each sample is a sequence of its own."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(index, index + self._config.sequence + 1) * (1 + index % 5)
        tokens %= 256
        return tokens[:-1], tokens[1:]


def main() -> None:
    args = script_parser(__doc__).parse_args()
    config = Config.from_args(args)
    dist.init_process_group("gloo")
    model = swift_ft.LayerStack(
        lambda number: build_layer(number, config),
        count=config.layers + 2,
        pipelines=2,
        exact=os.environ["EXACT"] == "1",
        stages_per_worker=1 if args.schedule in ONE_STAGE else 2,
    )
    stages = [
        PipelineStage(part, index, model.num_stages, torch.device("cpu"), group=model.group)
        for index, part in zip(model.stages, model.parts, strict=True)
    ]
    pipeline = stages[0] if args.schedule in ONE_STAGE else stages
    schedule = get_schedule_class(args.schedule)(pipeline, config.microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = swift_ft.data.GlobalBatches(
        Tokens(config),
        model.pipelines * config.microbatches * SAMPLES_OF_MICROBATCH,
        shuffle=True,
        log=os.environ["SAMPLE_LOG"],
    )
    state = {"model": model, "optimizer": optimizer, "batches": batches}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_pipeline(schedule)
    out = Path(args.weights_out)
    out.mkdir(parents=True, exist_ok=True)
    for step in session.steps(args.iterations):
        with step:
            x, y = batches[step.index]
            losses: list[Tensor] = []
            schedule.step(*[x] if 0 in model.stages else [], target=y, losses=losses, return_outputs=False)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if losses:
                done = f"iteration {step.index} of pipeline {model.pipeline}: {len(losses)} microbatches"
                print(f"{done}, losses add up to {sum(map(float, losses))!r}", flush=True)
        if step.index == PLANNED_AT and dist.get_rank() == 0:
            (out / "plan.json").write_text(json.dumps(session.plan().to_dict()))
    torch.save(model.state_dict(), out / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
