"""The example training, in which machines die at the very same time: a worker that lives kills the others."""

import itertools
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import gpt
import torch
import train_hybrid

FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
RANK = int(os.environ["RANK"])
calls = itertools.count(1)


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if next(calls) == int(os.environ["SWIFT_TEST_LOSSES"]):  # microbatches of the last stage
        for victim in os.environ["SWIFT_TEST_VICTIMS"].split(","):
            for pid in (FOLDER / f"pids{victim}").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
    return gpt.loss_fn(logits, targets)


if os.environ["SWIFT_LAUNCHED"] == "1":
    (FOLDER / f"pids{RANK}").write_text(f"{os.environ['SWIFT_AGENT_PID']} {os.getpid()}")
if int(os.environ["WORLD_SIZE"]) - 1 == RANK:
    train_hybrid.loss_fn = loss_fn
train_hybrid.main()
