"""A process's memory in large pages."""

from __future__ import annotations

import os
import subprocess
import sys

from swift_ft.launch.large_pages import _ranges

_SCRIPT = """
import os, random
from swift_ft.launch.large_pages import gather_pages

held = random.Random(3).randbytes(9 << 20)
before = hash(held), sorted(os.environ)
gather_pages()
gather_pages()
assert (hash(held), sorted(os.environ)) == before
if os.fork() == 0:
    changed = bytearray(held)
    changed[5 << 20] ^= 1
    os._exit(0 if held == random.Random(3).randbytes(9 << 20) else 1)
assert os.wait()[1] == 0
assert held == random.Random(3).randbytes(9 << 20)
"""


def test_what_is_in_memory_stays_as_it_is() -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True, timeout=120, env=dict(os.environ))


def test_only_whole_large_pages_that_are_no_files_are_gathered() -> None:
    maps = """\
00100000-00700000 rw-p 00000000 00:00 0                                  [heap]
01000000-01100000 rw-p 00000000 00:00 0
02000000-02400000 r--p 00000000 00:00 0
03000000-03400000 rw-s 00000000 00:01 77                                 /dev/shm/shared memory
04000000-04400000 rw-p 00000000 08:01 88                                 /usr/lib/libtorch_cpu.so
05000000-05400000 rw-p 00000000 00:00 0                                  [stack]
06000000-06400000 rwxp 00000000 00:00 0
"""
    assert [*_ranges(maps)] == [(0x200000, 0x600000), (0x6000000, 0x6400000)]
