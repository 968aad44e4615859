"""Processes that belong to no machine and to no run: they mend later what a test has broken.

Whoever starts one may be killed at any moment, with all that it has started. These are left alone.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

OUTSIDE = "swift_ft: outside of all machines"
"""In the command line of such a process. No machine takes it along."""


def start_outside(command: Sequence[str], code: str, *arguments: str, env: Mapping[str, str]) -> None:
    """Start one. It outlives this process.

    Args:
        command: of an interpreter whose comments begin with ``#``, such as ``["sh", "-c"]``.
        code: what it runs.
        arguments: for that.
        env: its environment: not this process's, by which the processes of a run are known.
    """
    devnull = subprocess.DEVNULL
    started = subprocess.Popen(
        [*command, f"# {OUTSIDE}\n{code}", *arguments],
        stdin=devnull,
        stdout=devnull,
        stderr=devnull,
        env=env,
        start_new_session=True,
    )
    started.returncode = 0  # nobody waits for it


def is_outside(pid: int) -> bool:
    """Whether a process is one of these."""
    with contextlib.suppress(OSError):  # it has ended
        return OUTSIDE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
