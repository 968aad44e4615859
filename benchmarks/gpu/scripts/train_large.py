"""A GPT in stages in bfloat16, with a session, or under torchrun with ``--plain``; its steps are timed.

``FOLDER/rank<r>.json`` has the seconds of each step after the first ones: on a GPU the device's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import Batches, Config, argument_parser, build_stage, loss_fn
from placement import BACKENDS, add_device_options, own_gpu
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import swift_ft


def main() -> None:
    """Train one stage."""
    args = _arguments()
    config = Config.from_args(args)
    device = own_gpu() if args.device == "cuda" else torch.device("cpu")
    dist.init_process_group(BACKENDS[args.device])
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build_stage(rank, world_size, config).to(device, torch.bfloat16)
    stage = PipelineStage(model, rank, world_size, device)
    schedule = Schedule1F1B(stage, config.microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches, clock = Batches(config, device), Clock(device)

    def train(iteration: int) -> None:
        x, y = batches[iteration]
        losses: list[Tensor] = []
        schedule.step(*[x] if rank == 0 else [], target=y, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()

    facts: dict[str, Any] = {"parameters": sum(one.numel() for one in model.parameters())}
    if args.plain:
        for iteration in range(args.iterations):
            train(iteration)
    else:
        state = {"model": model, "optimizer": optimizer}
        session = swift_ft.Session(
            state,
            store=args.store,
            checkpoint_every=10 * args.iterations,
            snapshot_every=args.snapshot_every,
        )
        session.attach_pipeline(schedule)
        facts |= _with_session(session, args.iterations, train)
    facts["steps"] = clock.seconds()[args.warm_up :]
    args.times.mkdir(parents=True, exist_ok=True)
    (args.times / f"rank{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


def _with_session(session: swift_ft.Session, iterations: int, train: Callable[[int], None]) -> dict[str, Any]:
    metrics = None
    for step in session.steps(iterations):
        with step:
            train(step.index)
        metrics = session.metrics()
    assert metrics is not None
    return {"messages": metrics.log.total.messages, "in_memory": metrics.in_memory}


class Clock:
    """When steps ended: on a GPU by events behind their work, which wait for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def tick(self) -> None:
        """A step is enqueued."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of each step, from the end of the one before."""
        return [*self._differences()]

    def _differences(self) -> Iterator[float]:
        if self._events:
            torch.cuda.synchronize()
        for before, after in zip(self._events, self._events[1:], strict=False):
            yield before.elapsed_time(after) / 1e3
        for earlier, later in zip(self._times, self._times[1:], strict=False):
            yield later - earlier


def _arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    add_device_options(parser)
    parser.add_argument("--plain", action="store_true", help="without a session")
    parser.add_argument("--store", help="with one")
    parser.add_argument("--snapshot-every", type=int, help="iterations between two memory checkpoints")
    parser.add_argument("--warm-up", type=int, default=3, help="steps not timed, default: %(default)s")
    parser.add_argument("--times", type=Path, required=True, help="folder for the result")
    return parser.parse_args()


if __name__ == "__main__":
    main()
