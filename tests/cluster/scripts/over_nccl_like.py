"""Runs a training script, the first argument, over the backend that behaves like NCCL instead of gloo."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch.distributed as dist

from swift_ft.launch.processes.main_module import run_main
from swift_ft.testing import nccl_like

os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", "5")  # a test waits so long for a death in a forming
nccl_like.register(runs_ahead=os.environ["SWIFT_TEST_BACKEND"] == "nccl_like_ahead")
original = dist.init_process_group


@functools.wraps(original)
def init_process_group(backend: str, *args: Any, **kwargs: Any) -> None:
    """As the script calls it, but for the backend."""
    assert backend == "gloo"
    original(nccl_like.NAME, *args, **kwargs)


public: Any = dist
public.init_process_group = init_process_group
run_main(sys.argv[1], sys.argv[2:])
