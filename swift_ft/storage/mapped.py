"""Parts of local files, mapped into memory: for those who look at each byte once, and need no copy of it.

The disk may fail under a map, and a file on a network share may be cut short. Touching such a page ends a
process with SIGBUS. So the system is asked to read all pages first, and a part that it cannot read is not
mapped: an ordinary read then says what is wrong.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

import numpy as np

_MADV_POPULATE_READ = 22  # of Linux 5.14 and newer; Python has no name for it yet


def map_part(file: int, begin: int, size: int) -> memoryview | None:
    """Map a part of a file, all of which has been read.

    Args:
        file: descriptor of a local file.
        begin: the first byte.
        size: in bytes, at least 1.

    Returns:
        The part; None if it cannot be mapped, or not all of it can be read. The map ends with the last view.
    """
    if begin % mmap.ALLOCATIONGRANULARITY:
        return None
    try:
        mapped = mmap.mmap(file, size, offset=begin, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # a file that is shorter, or that cannot be mapped
        return None
    return memoryview(mapped) if _is_read(mapped) else None


def _is_read(mapped: mmap.mmap) -> bool:
    """Have the system read all pages. Other threads run while it waits for the disk."""
    madvise = _madvise()
    if madvise is None:
        return False
    pages = np.frombuffer(mapped, np.uint8)
    return madvise(pages.ctypes.data, pages.nbytes, _MADV_POPULATE_READ) == 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    found: Callable[[int, int, int], int] = function
    return found
