"""A forked process copies what it shares with its parent before it writes to it, and nothing changes."""

from __future__ import annotations

import array
import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from swift_ft.host import pages
from tests.support.kernel import populates_pages

FORKED = """
import os, resource, sys
from swift_ft.host.pages import copy_shared

kept = [[number] for number in range(300_000)]
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
copied = copy_shared(lambda: False) if sys.argv[1] == "copies" else 0
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for number, [value] in enumerate(kept):
    if value != number:
        sys.exit(1)
for one in kept:
    one[0] += 1
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
again = copy_shared(lambda: False)
print(copied, faults, again, flush=True)
"""

PAGE = 4096
LEAST_COPIED = 300_000 * 56  # a list of one element


def forked(how: str) -> tuple[int, int, int]:
    """Bytes copied; faults as all objects are written to; bytes that were still shared after that."""
    done = subprocess.run([sys.executable, "-c", FORKED, how], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    copied, faults, again = map(int, done.stdout.split())
    return copied, faults, again


@pytest.mark.skipif(not populates_pages(), reason="needs Linux 5.14")
def test_what_was_copied_is_written_to_without_a_fault() -> None:
    copied, faults, again = forked("copies")
    assert copied > LEAST_COPIED
    assert faults < LEAST_COPIED / PAGE / 20
    assert again < copied / 20, "what a process has alone was copied again"


@pytest.mark.skipif(not populates_pages(), reason="needs Linux 5.14")
def test_otherwise_each_page_is_copied_when_it_is_first_written_to() -> None:
    _, faults, _ = forked("waits")
    assert faults > LEAST_COPIED / PAGE / 2


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Two runs of a gigabyte are shared. Where those begin that were copied, and what they have."""
    found: list[tuple[int, int]] = []

    def populate(begin: int, size: int) -> bool:
        found.append((begin, size))
        return True

    monkeypatch.setattr(pages, "_shared", lambda is_needed: iter([(0, 1 << 30), (1 << 30, 1 << 30)]))
    monkeypatch.setattr(pages, "populate", populate)
    return found


@pytest.mark.parametrize(("left", "most"), [(1 << 40, 2), (32 << 30, 1), (1 << 30, 0), (None, 0)])
def test_memory_that_is_short_is_left_alone(
    left: int | None, most: int, copied: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thirty-second of what is left, at most; nothing if that is not known."""
    monkeypatch.setattr(pages, "available_bytes", lambda: left)
    assert pages.copy_shared(lambda: False) == most << 30
    assert len(copied) == most


@pytest.mark.usefixtures("copied")
def test_what_cannot_be_copied_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "available_bytes", lambda: 1 << 40)
    monkeypatch.setattr(pages, "populate", lambda begin, size: begin > 0)
    assert pages.copy_shared(lambda: False) == 1 << 30


@pytest.mark.parametrize("looks", [0, 3])
def test_the_rest_is_left_out_as_soon_as_the_job_is_there(
    looks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also in a large mapping of which nothing is shared."""
    last = looks * 1024
    (tmp_path / "maps").write_text(f"0-{1 << 40:x} rw-p 0 0:0 0\n")
    entries = array.array("Q", [0] * (last + 1024))
    if looks:
        entries[last - 1] = 1 << 63
    (tmp_path / "pagemap").write_bytes(entries.tobytes())
    monkeypatch.setattr(pages, "_PROCESS", tmp_path)
    asked: list[bool] = []

    def is_needed() -> bool:
        asked.append(len(asked) == looks)
        return asked[-1]

    found = list(pages._shared(is_needed))
    assert found == [((last - 1) * mmap.PAGESIZE, mmap.PAGESIZE)] * bool(looks)
    assert len(asked) == looks + 1


def test_a_system_without_a_page_map_has_nothing_copied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pages, "_PROCESS", tmp_path)
    assert pages.copy_shared(lambda: False) == 0


@pytest.mark.parametrize(
    ("entries", "runs"),
    [
        ([], []),
        ([0, 0], []),
        ([1 << 63], [(0, 1)]),
        ([1 << 63, 1 << 63 | 1 << 56, 1 << 63 | 5, 1 << 63], [(0, 1), (2, 2)]),
        ([1 << 56, 1 << 62, 1 << 63 | 1 << 55, 0], [(2, 1)]),
    ],
)
def test_runs_are_of_pages_that_are_there_and_shared(entries: list[int], runs: list[tuple[int, int]]) -> None:
    assert list(pages._runs(entries)) == runs
