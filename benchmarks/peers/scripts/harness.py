"""Shared by all scripts of the side by side: the model's options, a trace of iterations, and the kill.

The trace is a folder with a file per process, `<rank>-<pid>-<n>.jsonl`; its lines have `event`, `at` (Unix
time) and more. The events are `start` (of the process, before all imports), `begin`, `end` (its update is in
the parameters) and `left` (it was not completed) of an `iteration`, `kill`, and `weights`, with a digest of
this worker's parameters after the iteration that was asked for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from gpt import Block, argument_parser
from instrument import process_start
from torch import Tensor, nn

from benchmarks.peers.processes import MACHINE, processes_with

_opened = count()


@dataclass
class Attempt:
    """One iteration as it goes, for a script to say more of it.

    Attributes:
        discarded: it ended without an update.
        workers: how many took part, where that may change.
    """

    discarded: bool = False
    workers: int | None = None


class Harness:
    """Traces one worker, and kills it when that is due.

    Args:
        args: of the command line, see :func:`parse_arguments`.
        rank: of this worker.
        model: whose parameters are compared, and in whose backward it dies.
    """

    def __init__(self, args: argparse.Namespace, rank: int, model: nn.Module) -> None:
        name = f"{rank}-{os.getpid()}-{next(_opened)}.jsonl"
        self._file = (args.trace / name).open("a", buffering=1)
        self._model = model
        self._digest_at: list[int] = args.digest_at
        self._kill_iteration: int | None = args.kill_iteration if rank == args.kill_rank else None
        self._whole_machine = args.kill == "machine"
        self._left = args.kill_call
        self._killed: Path = args.trace / "killed"
        self._write("start", at=process_start())

    @contextmanager
    def iteration(self, number: int) -> Iterator[Attempt]:
        """Traces an iteration: its beginning, and that it was completed or left."""
        if number == self._kill_iteration and not self._killed.exists():
            self._arm(number)
        attempt = Attempt()
        self._write("begin", iteration=number)
        try:
            yield attempt
        except BaseException:
            self._write("left", iteration=number)
            raise
        if attempt.discarded:
            self._write("left", iteration=number)
            return
        facts = {} if attempt.workers is None else {"workers": attempt.workers}
        self._write("end", iteration=number, cpu=time.process_time(), peak_kb=_peak_kb(), **facts)
        if number in self._digest_at:
            self._write("weights", iteration=number, digest=digest(self._model))

    def _write(self, event: str, **facts: Any) -> None:
        self._file.write(json.dumps({"event": event, "at": time.time(), **facts}) + "\n")

    def _arm(self, number: int) -> None:
        """Has the backward of the middle block kill this worker."""
        blocks = [module for module in self._model.modules() if isinstance(module, Block)]
        blocks[len(blocks) // 2].register_forward_hook(lambda _, __, out: _watch(out, strike))

        def strike(_: Tensor) -> None:
            self._left -= 1
            if self._left:
                return
            self._killed.touch()
            others = _of_this_machine() if self._whole_machine else []
            self._write("kill", iteration=number)
            for pid in (*others, os.getpid()):
                os.kill(pid, signal.SIGKILL)


def _watch(output: Tensor, strike: Callable[[Tensor], None]) -> None:
    if output.requires_grad:
        output.register_hook(strike)


def _of_this_machine() -> list[int]:
    """All other processes with the same ``MACHINE`` in their environment."""
    return processes_with(MACHINE, os.environ[MACHINE])


def digest(model: nn.Module) -> str:
    """SHA-256 of all parameters in their order; of a sharded one, this worker's shard."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        found.update(local.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _peak_kb() -> int:
    """Most memory that this process has had resident, in KiB.

    Not Python's own figure: the parent's is in it.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1])
    return 0


def parse_arguments(description: str | None, *more: tuple[str, dict[str, Any]]) -> argparse.Namespace:
    """The model's size, the trace, which worker is killed when, and the further options of a script."""
    parser = argument_parser(description)
    parser.add_argument("--trace", type=Path, required=True, help="folder for what happens when")
    parser.add_argument("--digest-at", type=int, nargs="*", default=[], help="iterations to compare after")
    parser.add_argument("--kill", choices=["machine", "process"], default="machine")
    parser.add_argument("--kill-rank", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--kill-iteration", type=int, help="default: no worker is killed")
    parser.add_argument("--kill-call", type=int, default=1, help="which backward in it, default: %(default)s")
    for flag, options in more:
        parser.add_argument(flag, **options)
    return parser.parse_args()
