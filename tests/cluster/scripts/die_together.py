"""The example training, in which machines die at the very same time: a surviving worker kills them."""

import itertools
import os
from pathlib import Path

import gpt
import torch
import train_hybrid

from swift_ft.config.worker_context import WorkerContext
from tests.support.machines import kill_once, note_machine
from tests.support.waiting import wait_until

CONTEXT = WorkerContext.from_env()
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
RANK = int(os.environ["RANK"])
calls = itertools.count(1)


def is_committed() -> bool:
    """Whether some checkpoint is."""
    return any((FOLDER / "store").glob("checkpoints/*/committed.json"))


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    due = next(calls) == int(os.environ["SWIFT_TEST_LOSSES"])  # microbatches of the last stage
    if due and CONTEXT.started_in == 1:
        wait_until(is_committed, "no checkpoint was committed")
        kill_once(*os.environ["SWIFT_TEST_VICTIMS"].split(","))
    return gpt.loss_fn(logits, targets)


if CONTEXT.started_in == 1:
    note_machine()
if int(os.environ["WORLD_SIZE"]) - 1 == RANK:
    train_hybrid.loss_fn = loss_fn
train_hybrid.main()
