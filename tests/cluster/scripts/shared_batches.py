"""Pipelines of a LayerStack that share global batches, and that machines may leave one by one.

All that a worker keeps is written at the end, by layer, so that runs with other pipelines can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import ONE_STAGE, Config, build_layer, loss_fn
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils.data import TensorDataset

import swift_ft
from tests.support.script import script_parser

PIPELINES, SAMPLES, SAMPLES_OF_MICROBATCH = 2, 400, 2


def samples(config: Config) -> TensorDataset:
    """Each sample is a sequence of its own."""
    numbers = torch.arange(SAMPLES)[:, None]
    tokens = (numbers + torch.arange(config.sequence + 1)) * (1 + numbers % 5) % 256
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--exact", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--min-stages", type=int, default=1)
    parser.add_argument("--gamma", type=float, default=1.0, help="of the learning rate")
    parser.add_argument("--plan-at", type=int, help="the iteration after which worker 0 writes the plan")
    args = parser.parse_args()
    config = Config.from_args(args)
    dist.init_process_group("gloo")
    model = swift_ft.LayerStack(
        lambda number: build_layer(number, config),
        count=config.layers + 2,
        pipelines=PIPELINES,
        exact=args.exact,
        stages_per_worker=1 if args.schedule in ONE_STAGE else 2,
        min_stages=args.min_stages,
    )
    stages = [
        PipelineStage(part, index, model.num_stages, torch.device("cpu"), group=model.group)
        for index, part in zip(model.stages, model.parts, strict=True)
    ]
    pipeline = stages[0] if args.schedule in ONE_STAGE else stages
    # A script whose number is its own ("OWN_MICROBATCHES") has equal pipelines only.
    planned = 0 if "OWN_MICROBATCHES" in os.environ else model.microbatches
    schedule = get_schedule_class(args.schedule)(pipeline, planned or config.microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=args.gamma)
    # Or each pipeline takes an equal part of the batch, whatever its number of microbatches ("EQUAL_PARTS").
    whole = "EQUAL_PARTS" in os.environ
    batches = swift_ft.data.GlobalBatches(
        samples(config),
        PIPELINES * config.microbatches * SAMPLES_OF_MICROBATCH,
        shuffle=True,
        replicas=1 if whole else None,
        log=None if whole else os.environ.get("SAMPLE_LOG"),
    )
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if not whole:
        state["batches"] = batches
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_pipeline(schedule)
    out = Path(args.weights_out)
    out.mkdir(parents=True, exist_ok=True)
    for step in session.steps(args.iterations):
        with step:
            x, y = batches[step.index]
            if whole:
                x, y = (part.chunk(model.pipelines)[model.pipeline] for part in (x, y))
            losses: list[Tensor] = []
            schedule.step(*[x] if 0 in model.stages else [], target=y, losses=losses, return_outputs=False)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if losses:
                done = f"iteration {step.index} of pipeline {model.pipeline}: {len(losses)} microbatches"
                print(f"{done}, losses add up to {sum(map(float, losses))!r}", flush=True)
        if step.index == args.plan_at and dist.get_rank() == 0:
            (out / "plan.json").write_text(json.dumps(session.plan().to_dict()))
    kept: dict[str, Tensor] = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        kept |= {f"{name} {of}": value for of, value in optimizer.state[parameter].items()}
    for layer in model.layers:
        kept[f"{layer}.scheduler"] = torch.tensor([scheduler.last_epoch, *scheduler.get_last_lr()])
    torch.save(kept, out / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
