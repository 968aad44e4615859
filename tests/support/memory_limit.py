"""A control group of the kernel's with a limit of memory, for processes of a test."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swift_ft.host.control_groups import GROUPS, MemoryGroup, memory_groups
from tests.support.missing import skip_for_missing

_EMPTY_S = 30.0


@contextmanager
def memory_limit(limit_bytes: int, name: str = "") -> Iterator[Path]:
    """Make a group of processes that may have so much memory together. Yields the file that takes their pids.

    Skips the test where no such group can be made.

    Args:
        limit_bytes: of all of them.
        name: tells groups of one test apart.
    """
    group, limit = _place(name)
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_bytes))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        skip_for_missing(f"the right to make a control group of memory ({error})")
    try:
        yield group / "cgroup.procs"
    finally:
        deadline = time.monotonic() + _EMPTY_S
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        group.rmdir()


def _place(name: str) -> tuple[Path, str]:
    """The folder of a new group within this process's own, and the name of the file of its limit."""
    own = next(iter(memory_groups()), MemoryGroup(GROUPS, unified=True))
    limit = "memory.max" if own.unified else "memory.limit_in_bytes"
    return own.folder / f"swift-ft-test-{os.getpid()}{name}", limit
