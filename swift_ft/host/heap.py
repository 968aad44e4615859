"""glibc's heap: what becomes of memory that is freed, and pages that are mapped before they are used.

glibc gives the free end of its heap back to the kernel when that is larger than twice the largest block that
the process has freed so far (``M_TRIM_THRESHOLD`` in mallopt(3)). A new process has freed no large one yet.
So each of its iterations gives gradients and activations back, and the kernel maps and clears them again:
6,000 page faults in each iteration of the example (docs/decisions/0045-heap.md).

Each session has 64 MiB kept, by a block that it frees. That changes nothing where the user, or a rehearsal
before, has set a threshold. A process that only waits for its job (`launch/processes/rehearsal.py`) sets all
of them: what it has mapped ahead is free, and would be given back at once.

Nothing is done with another C library, and a freed block is harmless in another allocator.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

from swift_ft.host.memory import available_bytes
from swift_ft.host.pages import populate

_LARGEST_BYTES = 32 * 2**20
"""glibc takes no larger block from the heap, and learns from none that it is freed."""
_BLOCK_BYTES = _LARGEST_BYTES - 64 * 2**10
"""A little less, with what glibc adds."""

_MOST_AHEAD_BYTES = 256 * 2**20
"""A process that trains has more than this anyway."""
_SHARE = 32
"""At most such a part of what the host has left: a machine may have many workers."""
_ONCE_BYTES = 4 * 2**20
"""Between two looks whether the job is there."""
_KEPT_BYTES = 2**30

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_TUNES = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Variables that begin so tune glibc's allocator, or may replace it."""


def keep_freed_memory() -> None:
    """Allocate a large block and free it untouched: from then on glibc keeps up to 64 MiB of freed memory."""
    if (libc := _glibc()) is not None:
        _free_a_block(libc)


def map_ahead(is_needed: Callable[[], bool]) -> int:
    """Have memory mapped that the next allocations get, and keep it when it is freed. Returns how many bytes.

    ``mallopt`` concerns the whole process for good, so an allocator that the user has tuned is left alone.

    Args:
        is_needed: whether the memory is needed now, and the rest is left out.
    """
    left = available_bytes()
    size = min(_MOST_AHEAD_BYTES, (left or 0) // _SHARE) // _ONCE_BYTES * _ONCE_BYTES
    if not size or is_needed() or any(os.environ[name] for name in os.environ if name.startswith(_TUNES)):
        return 0
    libc = _glibc()
    return 0 if libc is None else _mapped(_grown(libc, size), size, is_needed)


def _glibc() -> Any:
    """The C library of this process; None if it is another one."""
    try:
        libc: Any = ctypes.CDLL(None)
    except OSError:
        return None
    if not hasattr(libc, "gnu_get_libc_version"):
        return None
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    return libc


def _free_a_block(libc: Any) -> int:
    """Take a block from the heap and give it back. Returns where it began."""
    block: int | None = libc.malloc(_BLOCK_BYTES)
    libc.free(block)
    return block or 0


def _grown(libc: Any, size: int) -> int:
    """Let the heap of the calling thread grow, and keep what is freed. Returns where the new part begins."""
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    libc.mallopt(_M_TOP_PAD, size)
    block = _free_a_block(libc)
    libc.mallopt(_M_TOP_PAD, _ONCE_BYTES)
    return -(-block // mmap.PAGESIZE) * mmap.PAGESIZE


def _mapped(begin: int, size: int, is_needed: Callable[[], bool]) -> int:
    """Map pages, from the first that the heap hands out. Their contents stay as they are."""
    for offset in range(0, size, _ONCE_BYTES):
        if is_needed() or not populate(begin + offset, _ONCE_BYTES):
            return offset  # the latter: an old kernel, or the heap has shrunk
    return size
