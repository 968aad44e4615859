"""A pipeline whose loss depends on something that is in no state, and that nothing can see.

python hidden_state.py STORE HABIT [ITERATIONS]

counter   how many steps this process has begun, from the first one on
late      the same, from the eighth one on
machine   the third worker that starts has another value in its environment, as on a machine of its own
"""

import itertools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import swift_ft
from tests.support.habits import leave

STORE, HABIT = sys.argv[1:3]
ITERATIONS = int(sys.argv[3]) if len(sys.argv) > 3 else 8
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
MICROBATCHES = 4

begun = itertools.count(1)
scale = 1.0


def number_of_this_start() -> int:
    with (FOLDER / "starts").open("ab") as starts:
        starts.write(b".")
        starts.flush()
        return starts.tell()


def factor() -> float:
    """By which the losses of a step are multiplied."""
    if HABIT == "machine":
        return float(os.environ.get("LOSS_SCALE", "1"))
    number = next(begun)
    if HABIT == "late":
        return 1.0 + max(0, number - 7)
    return float(number)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean() * scale


def main() -> None:
    global scale
    if HABIT == "machine" and number_of_this_start() == 3:
        os.environ["LOSS_SCALE"] = "1.5"
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(module.parameters(), lr=1e-2))
    session = swift_ft.Session({"model": module, "optimizer": optimizer}, store=STORE, checkpoint_every=3)
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    session.attach_pipeline(schedule)
    for step in session.steps(ITERATIONS):
        with step:
            scale = factor()
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step.index))
            schedule.step(*[x] if rank == 0 else [], target=x if rank == size - 1 else None)
            optimizer.step()
            optimizer.zero_grad()
    leave(rank, {"model": module.state_dict(), "optimizer": optimizer.state_dict()["state"]})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
