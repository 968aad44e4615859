"""A replacement's heap grows before it is needed. In a process of its own: it lasts for all of its life."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from swift_ft import heap

CHECK = """
import ctypes, resource
import numpy
from swift_ft.heap import grow_heap

thread = grow_heap()
assert thread is not None
kept = [bytearray(1 << 20) for _ in range(8)]  # while the other thread maps pages
for number, block in enumerate(kept):
    block[:] = bytes([number]) * len(block)
thread.join()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
blocks = [numpy.full(8 << 20, number, dtype=numpy.uint8) for number in range(8)]
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
assert all(set(block) == {number} for number, block in enumerate(kept))
assert all((block == number).all() for number, block in enumerate(blocks))
print(faults)
"""


def can_map() -> bool:
    """Whether this is glibc on Linux 5.14 or later."""
    here = platform.libc_ver()[0] == "glibc" and sys.platform == "linux"
    return here and tuple(map(int, platform.release().split(".")[:2])) >= (5, 14)


@pytest.mark.skipif(not can_map(), reason="needs glibc, and Linux 5.14")
def test_no_page_of_it_is_mapped_when_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 * 2**20 // 4096 // 4, "pages were not mapped before"


def test_nothing_happens_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "available_bytes", lambda: 64 << 20)
    assert heap.grow_heap() is None
    monkeypatch.setattr(heap, "available_bytes", lambda: None)
    assert heap.grow_heap() is None
