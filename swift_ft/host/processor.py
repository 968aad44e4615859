"""The processor that computes, as far as its results may differ from another one's."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch

CHOOSES_BY_TIME = "cuDNN chooses the fastest kernel (torch.backends.cudnn.benchmark)"
_NAMES = ("model name", "CPU implementer", "CPU part", "CPU variant")
"""In /proc/cpuinfo: of x86, and of ARM."""


def processor_in_words(device: torch.device) -> str:
    """Two processors with unlike words may round in other ways.

    Args:
        device: that computes.
    """
    if device.type == "cuda":
        version = f"{torch.cuda.get_device_name(device)}, cuDNN {torch.backends.cudnn.version()}"
        return f"{version}, {CHOOSES_BY_TIME}" if torch.backends.cudnn.benchmark else version
    return f"{_model()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def why_other_bits(here: str, there: str) -> str:
    """Why a spare may compute other bits than a machine where nobody is wrong; empty if it should not.

    Args:
        here: the spare's processor, in words.
        there: the machine's; empty if it is not known.
    """
    if here != there:
        return f"it computes on {there or 'an unknown processor'}, and the spare on {here}"
    return f"{CHOOSES_BY_TIME}, which may be another one each time" if CHOOSES_BY_TIME in here else ""


@functools.cache
def _model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return " ".join([platform.machine(), *(facts[name] for name in _NAMES if name in facts)])
