"""What a worker does that is forked ahead, until it gets its job: makes ready what others will wait for.

A new process pays for each page when it first touches it: the kernel maps and clears it, or copies what is
still the standby's. For a model of 4 million parameters that is 38,000 pages until the end of the first
iteration, 60 ms of the kernel's time. And torch sets much up at its first use. A spare has nothing else to
do until it is needed.

glibc's heap grows on Linux only, and only as it comes: another allocator is left alone, and so is one that
the user has tuned: ``mallopt`` concerns the whole process.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from swift_ft.checkpoint.state_payload import pack, unpack
from swift_ft.host_memory import available_bytes

__all__ = ["rehearse"]

_MOST_BYTES = 256 * 2**20
"""A process that trains has more than this anyway."""
_SHARE = 32
"""At most such a part of what the host has left: a machine may have many workers."""
_ONCE_BYTES = 4 * 2**20
"""Between two looks whether the job is there."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MADV_POPULATE_WRITE = 23
_LARGEST_BYTES = 32 * 2**20
"""glibc takes no larger block from the heap."""
_KEPT_BYTES = 2**30
_TUNES = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Variables that begin so tune glibc's allocator, or may replace it."""


def rehearse(is_needed: Callable[[], bool]) -> None:
    """Make ready, and change nothing that a script could see.

    Args:
        is_needed: whether the job is there, and the rest is left out.
    """
    # An accelerator's torch looks for devices in a backward. And with several threads a parallel loop starts
    # them, which hangs for ever where a process before this one had some when it forked.
    host_only = not (torch.version.cuda or torch.version.hip or torch.version.xpu)
    if host_only and torch.get_num_threads() == 1 and not is_needed():
        _train()
    _grow_heap(is_needed)


def _train() -> None:
    """Train a toy twice, as workers do, and take its state over."""
    with torch.random.fork_rng(devices=[]):
        layers = nn.Embedding(8, 16), nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8)
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        words = torch.zeros(2, 4, dtype=torch.int64)
        for _ in range(2):
            nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        set_model_state_dict(model, get_model_state_dict(model))
        optimizer.load_state_dict(unpack(pack(optimizer.state_dict())))


def _grow_heap(is_needed: Callable[[], bool]) -> int:
    """Have memory mapped that the next allocations get. Returns how many bytes."""
    left = available_bytes()
    size = min(_MOST_BYTES, (left or 0) // _SHARE) // _ONCE_BYTES * _ONCE_BYTES
    if not size or is_needed() or any(os.environ[name] for name in os.environ if name.startswith(_TUNES)):
        return 0
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc: Any = ctypes.CDLL(None)
        libc.gnu_get_libc_version.restype = ctypes.c_char_p
        libc.gnu_get_libc_version()
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        return _mapped(libc, _grown(libc, size), size, is_needed)
    return 0


def _grown(libc: Any, size: int) -> int:
    """Let the heap of the calling thread grow, and keep what is freed. Returns where the new part begins."""
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    libc.mallopt(_M_TOP_PAD, size)
    block: int = libc.malloc(_LARGEST_BYTES - mmap.PAGESIZE)
    libc.free(block)
    libc.mallopt(_M_TOP_PAD, _ONCE_BYTES)
    return -(-block // mmap.PAGESIZE) * mmap.PAGESIZE


def _mapped(libc: Any, begin: int, size: int, is_needed: Callable[[], bool]) -> int:
    """Map pages, from the first that the heap hands out. Their contents stay as they are."""
    for offset in range(0, size, _ONCE_BYTES):
        if is_needed() or libc.madvise(begin + offset, _ONCE_BYTES, _MADV_POPULATE_WRITE):
            return offset  # the latter: a kernel before 5.14, or the heap has shrunk
    return size
