"""A worker that is forked ahead makes ready. In a process of its own: its heap stays as it is for good."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from swift_ft.launch import rehearsal

CHECK = """
import resource
import numpy
import swift_ft.launch.rehearsal as rehearsal

kept = [bytearray(1 << 20) for _ in range(8)]
for number, block in enumerate(kept):
    block[:] = bytes([number]) * len(block)
rehearsal.rehearse(lambda: False)
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


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test fails that changes the heap of this process."""
    monkeypatch.setattr(rehearsal, "available_bytes", lambda: 64 << 30)
    monkeypatch.setattr(rehearsal, "_grown", lambda libc, size: pytest.fail("the heap was changed"))


@pytest.mark.skipif(not can_map(), reason="needs glibc, and Linux 5.14")
def test_no_page_of_the_heap_is_mapped_when_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 * 2**20 // 4096 // 4, "pages were not mapped before"


@pytest.mark.usefixtures("untouched")
def test_no_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process had threads of OpenMP and has forked, its child waits for them for ever."""
    monkeypatch.setattr(rehearsal, "available_bytes", lambda: None)
    monkeypatch.setattr(rehearsal, "_train", lambda: pytest.fail("a toy was trained with two threads"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    rehearsal.rehearse(lambda: False)


@pytest.mark.usefixtures("untouched")
def test_random_numbers_stay_what_they_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "available_bytes", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    before = torch.get_rng_state()
    rehearsal.rehearse(lambda: False)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("untouched")
def test_the_heap_stays_as_it_is_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "available_bytes", lambda: 64 << 20)
    rehearsal.rehearse(lambda: False)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("variable", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_an_allocator_that_the_user_chose_is_left_alone(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    rehearsal.rehearse(lambda: False)


@pytest.mark.usefixtures("untouched")
def test_a_job_that_is_there_waits_for_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_train", lambda: pytest.fail("the job had to wait"))
    rehearsal.rehearse(lambda: True)
