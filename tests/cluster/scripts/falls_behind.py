"""Pipelines of a LayerStack. One worker does not learn that all have their averages, and is a step behind.

In iteration 5, all have told each other and update their parameters, but for worker 3. It waits until they
have begun the next iteration, kills worker 1, and waits for that one until the connection breaks. So only
worker 3 is left of those that have the last layers.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import train_elastic

import swift_ft
from swift_ft.config.worker_context import WorkerContext
from swift_ft.torch_adapters.communication import wait_for
from swift_ft.torch_adapters.pipelining.layer_averages import LayerAverages
from tests.support import begun
from tests.support.begun import wait_until_begun

context = WorkerContext.from_env()
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
original = LayerAverages._wait_for_all


def falls_behind(self: LayerAverages) -> None:
    original(self)
    if self._iteration != 5 or context.started_in != 1 or context.rank != 3:
        return
    wait_until_begun(6, range(3))
    os.kill(int((FOLDER / "pid1").read_text()), signal.SIGKILL)
    work = dist.irecv(torch.zeros(1), 1, group=self._group)
    assert work is not None
    wait_for([work])


def main() -> None:
    if context.started_in == 1:
        (FOLDER / f"pid{context.rank}").write_text(str(os.getpid()))
    LayerAverages._wait_for_all = falls_behind
    swift_ft.Session = begun.Session  # type: ignore[misc]
    train_elastic.main()


if __name__ == "__main__":
    main()
