"""Pages of this process's memory: made writable before they are needed, which changes nothing in them.

A forked process shares its pages with its parent until one of both writes to them, and Python writes to each
object that it looks at, for it counts references. The kernel copies such a page in a microsecond or two, and
a worker that runs its script for the first time has thousands.
"""

from __future__ import annotations

import array
import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from swift_ft.host.memory import available_bytes

_MADV_POPULATE_WRITE = 23
_PROCESS = Path("/proc/self")
_PRESENT, _EXCLUSIVE = 1 << 63, 1 << 56
"""Of a page's entry in the kernel's page map: it is in memory, and no other process has it, too."""

_SHARE = 32
"""At most such a part of what the host has left is copied: a machine may have many workers."""
_ONCE_PAGES = 1024
"""Between two looks whether the job is there."""


def populate(begin: int, size: int) -> bool:
    """Make the kernel map pages as if each was written to. False if it cannot: it is older than Linux 5.14.

    Args:
        begin: an address, the first of a page.
        size: bytes.
    """
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):  # another system
        return False
    return int(madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)) == 0


def copy_shared(is_needed: Callable[[], bool]) -> int:
    """Copy what this process still shares with the one that forked it. Returns how many bytes.

    Args:
        is_needed: whether the process is needed now, and the rest is left out.
    """
    left, copied = (available_bytes() or 0) // _SHARE, 0
    for begin, size in _shared(is_needed):
        if copied + size > left:
            break
        if populate(begin, size):  # not the memory of a device, nor with an old kernel
            copied += size
    return copied


def _shared(is_needed: Callable[[], bool]) -> Iterator[tuple[int, int]]:
    """Runs of shared pages that this process may write to: the address and the bytes of each.

    Args:
        is_needed: asked also where there are none, for a mapping may have millions of pages.
    """
    try:
        mappings = (_PROCESS / "maps").read_text().splitlines()
        page_map = (_PROCESS / "pagemap").open("rb", buffering=0)
    except OSError:  # the system has none, or hides it
        return
    with page_map:
        for mapping in mappings:
            addresses, rights = mapping.split()[:2]
            if rights != "rw-p":
                continue
            begin, end = (int(address, 16) // mmap.PAGESIZE for address in addresses.split("-"))
            for first in range(begin, end, _ONCE_PAGES):
                if is_needed():
                    return
                page_map.seek(first * 8)
                entries = array.array("Q", page_map.read(min(_ONCE_PAGES, end - first) * 8))
                for index, count in _runs(entries):
                    yield (first + index) * mmap.PAGESIZE, count * mmap.PAGESIZE


def _runs(entries: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of shared pages: the index of the first page, and the number of pages."""
    begin = 0
    for index, entry in enumerate(entries):
        if entry & (_PRESENT | _EXCLUSIVE) != _PRESENT:
            if index > begin:
                yield begin, index - begin
            begin = index + 1
    if len(entries) > begin:
        yield begin, len(entries) - begin
