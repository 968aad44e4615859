"""The example ``train_elastic``, in which no worker of another world finds the memory for its layers.

``STARVED`` says how it ends: ``raises`` as on a GPU that is full, ``killed`` as by the kernel of a host,
``takes all`` by that kernel, once it has taken all memory.
"""

import os
import signal

import gpt
import torch
from takes_all_memory import take_all  # type: ignore[import-not-found]
from torch import nn

from swift_ft.config.worker_context import WorkerContext

STARVED = os.environ["STARVED"]
FULL = "CUDA out of memory. Tried to allocate 20.00 GiB."
make_layer = gpt.build_layer


def build_layer(number: int, config: gpt.Config) -> nn.Module:
    if WorkerContext.from_env().world:
        if STARVED == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if STARVED == "takes all":
            take_all()
        raise torch.OutOfMemoryError(FULL)
    return make_layer(number, config)


gpt.build_layer = build_layer
from train_elastic import main  # noqa: E402  (it takes the function above)

__all__ = ["main"]
