"""A new process keeps what it frees, once it has been told so."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from swift_ft.torch_adapters.core.heap import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()

def iterate():
    return [torch.ones(250_000 - n) for n in range(24)]

iterate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    iterate()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library decides by itself")
def test_what_is_freed_is_not_given_back() -> None:
    faults = {
        mode: int(
            subprocess.run(
                [sys.executable, "-c", SCRIPT, mode], check=True, capture_output=True, text=True, timeout=120
            ).stdout
        )
        for mode in ("as it comes", "keep")
    }
    assert faults["keep"] < faults["as it comes"] / 4
