"""Pipelines of a LayerStack that share global batches: each gets as many microbatches as it can take."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Config, argument_parser, build_layer, loss_fn
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils.data import Dataset

import swift_ft

SAMPLES, SAMPLES_OF_MICROBATCH = 400, 2


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
    parser = argument_parser(__doc__)
    parser.add_argument("--store")
    parser.add_argument("--checkpoint-every", type=int)
    args = parser.parse_args()
    config = Config.from_args(args)
    dist.init_process_group("gloo")
    model = swift_ft.LayerStack(
        lambda number: build_layer(number, config),
        count=config.layers + 2,
        pipelines=2,
        exact=os.environ["EXACT"] == "1",
    )
    stage = PipelineStage(model, model.stage, model.num_stages, torch.device("cpu"), group=model.group)
    schedule = get_schedule_class(args.schedule)(stage, config.microbatches, loss_fn=loss_fn)
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
    for step in session.steps(args.iterations):
        with step:
            x, y = batches[step.index]
            losses: list[Tensor] = []
            schedule.step(*[x] if model.stage == 0 else [], target=y, losses=losses, return_outputs=False)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if losses:
                print(f"iteration {step.index}: {len(losses)} microbatches", flush=True)
    out = Path(args.weights_out)
    out.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), out / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
