"""Pipelines of a LayerStack. One worker does not learn that all have their averages, and is a step behind.

In iteration 5, when all have told each other, worker 3 kills worker 1, and waits for it until the connection
breaks. All others update their parameters, and only worker 3 is left of those that have the last layers.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import train_elastic

from swift_ft.torch_adapters.communication import wait_for
from swift_ft.torch_adapters.pipelining.layer_averages import LayerAverages
from swift_ft.worker_context import WorkerContext

context = WorkerContext.from_env()
folder = Path(os.environ["PIDS"])
original = LayerAverages._wait_for_all


def falls_behind(self: LayerAverages) -> None:
    original(self)
    if self._iteration != 5 or context.started_in != 1 or context.rank != 3:
        return
    time.sleep(0.5)  # the others update meanwhile, and wait for this worker in the next iteration
    os.kill(int((folder / "1").read_text()), signal.SIGKILL)
    work = dist.irecv(torch.zeros(1), 1, group=self._group)
    assert work is not None
    wait_for([work])


def main() -> None:
    if context.started_in == 1:
        (folder / str(context.rank)).write_text(str(os.getpid()))
    LayerAverages._wait_for_all = falls_behind
    train_elastic.main()


if __name__ == "__main__":
    main()
