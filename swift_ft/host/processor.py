"""The processor that computes, as far as its results may differ from another one's."""

from __future__ import annotations

import functools
from pathlib import Path

import torch


def processor_in_words(device: torch.device) -> str:
    """Two processors with unlike words may round in other ways.

    Args:
        device: that computes.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_model()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


@functools.cache
def _model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "an unknown processor"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "an unknown processor")
