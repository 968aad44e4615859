"""What all contenders share: the model, the data, the optimizer, the kill, the trace.

The trace is a folder with a file per process, `<rank>-<pid>.jsonl`; its lines have `event`, `at` (Unix time)
and more. The events are `start` (of the process: before Python's own start and all imports), `joined` (it can
talk to its peers), `begin` and `end` (of an `iteration`; with the process's `cpu` seconds so far), `saved`
(a checkpoint, in `seconds`) and `kill`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpt import Batches, Config, argument_parser, build_stage, loss_fn
from instrument import process_start
from torch import Tensor, nn

WORKERS = 2


class Trace:
    """Writes the events of this process to a file, as they happen.

    Args:
        folder: for the file.
        rank: of this worker.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"{rank}-{os.getpid()}.jsonl").open("a", buffering=1)
        self("start", at=process_start())

    def __call__(self, event: str, **facts: Any) -> None:
        """Writes one event, of now if ``at`` does not say otherwise."""
        self._file.write(json.dumps({"event": event, "at": time.time(), **facts}) + "\n")

    def end(self, iteration: int) -> None:
        """An iteration is complete: its update is in the parameters."""
        self("end", iteration=iteration, cpu=time.process_time())


class Work:
    """One worker's half of the training.

    Args:
        args: of the command line, see :func:`parse_arguments`.
        rank: which half of each batch.
        trace: where this process writes down what happens.

    Attributes:
        model: the whole GPT, not wrapped.
        optimizer: of its parameters.
    """

    def __init__(self, args: argparse.Namespace, rank: int, trace: Trace) -> None:
        config = Config.from_args(args)
        self.trace = trace
        self.model = build_stage(0, 1, config)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._batches = Batches(config)
        self._rank = rank
        self._kill = None if rank != args.kill_rank else args.kill_iteration
        self._killed = args.trace / "killed"

    def loss(self, model: nn.Module, iteration: int) -> Tensor:
        """The loss of this worker's half of a batch; ``model`` is the wrapped one."""
        x, y = (part.chunk(WORKERS)[self._rank] for part in self._batches[iteration])
        return loss_fn(model(x), y)

    def kill_when_due(self, iteration: int, also: Sequence[int] = ()) -> None:
        """Arms a SIGKILL of this process for the middle of the next backward, once in a run.

        Args:
            iteration: the one that begins.
            also: processes to kill just before: what belongs to the same machine.
        """
        if iteration != self._kill or self._killed.exists():
            return

        def strike(_: Tensor) -> None:
            self._killed.touch()
            self.trace("kill", iteration=iteration)
            for pid in (*also, os.getpid()):
                os.kill(pid, signal.SIGKILL)

        parameters = list(self.model.parameters())
        parameters[len(parameters) // 2].register_hook(strike)


def parse_arguments(description: str | None, *more: tuple[str, dict[str, Any]]) -> argparse.Namespace:
    """The model's size, the trace, which worker is killed when, and the further options of a script."""
    parser = argument_parser(description)
    parser.add_argument("--trace", type=Path, required=True, help="folder for what happens when")
    parser.add_argument("--kill-rank", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--kill-iteration", type=int, help="default: no worker is killed")
    for flag, options in more:
        parser.add_argument(flag, **options)
    return parser.parse_args()
