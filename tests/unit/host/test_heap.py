"""What is freed is kept, and pages are mapped ahead. In processes of their own: a heap stays so for good."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from swift_ft.host import heap
from tests.support.kernel import populates_pages

KEEP = """
import resource, sys
import torch
from swift_ft.host.heap import keep_freed_memory

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

MAP_AHEAD = """
import resource
import numpy
from swift_ft.host.heap import keep_freed_memory, map_ahead

kept = [bytearray(1 << 20) for _ in range(8)]
for number, block in enumerate(kept):
    block[:] = bytes([number]) * len(block)
map_ahead(lambda: False)
keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    blocks = [numpy.full(8 << 20, number, dtype=numpy.uint8) for number in range(8)]
    assert all((block == number).all() for number, block in enumerate(blocks))
    del blocks
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
assert all(set(block) == {number} for number, block in enumerate(kept))
print(faults)
"""


def can_map() -> bool:
    """Whether this is glibc on Linux 5.14 or later."""
    return platform.libc_ver()[0] == "glibc" and populates_pages()


def faults_of(script: str, *arguments: str) -> int:
    """What a script prints."""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test fails that changes the heap of this process."""
    monkeypatch.setattr(heap, "available_bytes", lambda: 64 << 30)
    monkeypatch.setattr(heap, "_grown", lambda libc, size: pytest.fail("the heap was changed"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library decides by itself")
def test_what_is_freed_is_not_given_back() -> None:
    assert faults_of(KEEP, "keep") < faults_of(KEEP, "as it comes") / 4


@pytest.mark.skipif(not can_map(), reason="needs glibc, and Linux 5.14")
def test_no_page_of_the_heap_is_mapped_when_it_is_used() -> None:
    """Nor when it is used again, in a session."""
    assert faults_of(MAP_AHEAD) < 64 * 2**20 // 4096 // 4, "pages were not mapped before, or were given back"


@pytest.mark.usefixtures("untouched")
def test_the_heap_stays_as_it_is_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "available_bytes", lambda: 64 << 20)
    assert heap.map_ahead(lambda: False) == 0


@pytest.mark.usefixtures("untouched")
def test_the_heap_stays_as_it_is_where_memory_is_needed_at_once() -> None:
    assert heap.map_ahead(lambda: True) == 0


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("variable", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_an_allocator_that_the_user_chose_is_left_alone(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    assert heap.map_ahead(lambda: False) == 0


@pytest.mark.usefixtures("untouched")
def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert heap.map_ahead(lambda: False) == 0
    heap.keep_freed_memory()
