"""Memory for a replacement's first iteration, made ready by another thread while the script starts.

A new process has no memory yet: the kernel maps each page when it is first touched, and clears it. For a
model of 4 million parameters that takes a sixth of the first iteration, in which all other workers wait for
this one. And glibc gives large blocks back at once, so the second iteration pays again. So here the heap
grows at once, the kernel maps its pages in the background, and freed memory is kept.

glibc on Linux only; elsewhere nothing happens. Private parts used: none, but ``mallopt`` concerns the whole
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from typing import Any

from swift_ft.host_memory import available_bytes

__all__ = ["grow_heap"]

_MOST_BYTES = 192 * 2**20
"""A process that trains has more than this anyway."""
_SHARE = 32
"""At most such a part of what the host has left: other workers start at the same time."""
_ONCE_BYTES = 4 * 2**20
"""How much is mapped in one call, which may keep others of this process from mapping any."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MADV_POPULATE_WRITE = 23
_LARGEST_BYTES = 32 * 2**20
"""glibc takes no larger block from the heap."""


def grow_heap() -> threading.Thread | None:
    """Have memory ready for what comes. Returns at once; None if nothing is done."""
    left = available_bytes()
    size = min(_MOST_BYTES, (left or 0) // _SHARE) // _ONCE_BYTES * _ONCE_BYTES
    if not size:
        return None
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc: Any = ctypes.CDLL(None)
        libc.gnu_get_libc_version.restype = ctypes.c_char_p
        libc.gnu_get_libc_version()
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        begin = _grown(libc, size)
        thread = threading.Thread(target=_map, args=(libc, begin, size), name="swift_ft heap", daemon=True)
        thread.start()
        return thread
    return None


def _grown(libc: Any, size: int) -> int:
    """Let the heap of the calling thread grow. Returns where the new part begins."""
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**30)
    libc.mallopt(_M_TOP_PAD, size)
    block: int = libc.malloc(_LARGEST_BYTES - mmap.PAGESIZE)
    libc.free(block)
    libc.mallopt(_M_TOP_PAD, _ONCE_BYTES)
    return -(-block // mmap.PAGESIZE) * mmap.PAGESIZE


def _map(libc: Any, begin: int, size: int) -> None:
    """Map pages, from the first that the heap hands out. Their contents stay as they are."""
    for offset in range(0, size, _ONCE_BYTES):
        if libc.madvise(begin + offset, _ONCE_BYTES, _MADV_POPULATE_WRITE):
            return  # a kernel before 5.14, or the heap has shrunk
