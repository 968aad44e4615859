"""Harm that a worker does to itself, its machine or its store, as a fault says."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from swift_ft.host.outside import is_outside, start_outside

_TOUCHED_IN_A_FILE = 0.5
"""The part of a file before the byte that is flipped, and the part that a truncated file keeps."""
AWAY = ".away"
"""The suffix of a store that has vanished."""
_LATER = "import os, shutil, signal, sys, time\ntime.sleep(float(sys.argv[1]))\n"
_STOP = """
import os, signal, sys
for pid in sys.argv[2:]:
    try:
        os.kill(int(pid), signal.SIGSTOP)
    except ProcessLookupError:
        pass
"""
_GO_ON = """
for pid in sys.argv[2:]:
    try:
        os.kill(int(pid), signal.SIGCONT)
    except ProcessLookupError:
        pass
"""
_BACK = """
shutil.rmtree(sys.argv[2], ignore_errors=True)
os.rename(sys.argv[3], sys.argv[2])
"""


def freeze(seconds: float) -> None:
    """Hold the interpreter: a call through PyDLL keeps its lock.

    It is another thread's, as that of an extension that does not release it.
    """
    sleep = ctypes.PyDLL(None).usleep
    holder = threading.Thread(target=sleep, args=(ctypes.c_uint(round(seconds * 1e6)),), daemon=True)
    holder.start()
    holder.join()


def suspend(agent_pid: int, seconds: float) -> None:
    """Stop an agent and all processes below it, this one among them. Another process lets them go on."""
    others = [pid for pid in (agent_pid, *below(agent_pid)) if pid != os.getpid()]
    # It stops them, too: a process that has stopped itself could stop no other.
    _beside(_STOP + _LATER + _GO_ON, seconds, *others, os.getpid())
    threading.Event().wait(seconds)  # it is stopped within this wait, wherever that ends


def jump(seconds: float) -> None:
    """Let ``time.time()`` and ``time.time_ns()`` of this process jump."""
    before, before_ns = time.time, time.time_ns
    time.time = lambda: before() + seconds
    time.time_ns = lambda: before_ns() + round(seconds * 1e9)


def newest_files(store: Path, counts: Callable[[str], bool]) -> list[Path]:
    """The files in a store, those first that were written last. Any of them may go at any moment.

    Args:
        store: its folder.
        counts: tells by the path in the store whether a file is one to strike.
    """
    found = []
    for folder, _, names in os.walk(store):  # unlike rglob() it passes over folders that go meanwhile
        for path in (Path(folder, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                if counts(path.relative_to(store).as_posix()) and (facts := path.stat()).st_size:
                    found.append((facts.st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def flip(file: Path) -> None:
    """Change one bit in the middle of a file.

    Raises:
        FileNotFoundError: it is gone.
    """
    with file.open("r+b") as opened:
        place = math.floor(os.fstat(opened.fileno()).st_size * _TOUCHED_IN_A_FILE)
        opened.seek(place)
        (byte,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte ^ 1]))


def truncate(file: Path) -> None:
    """Cut off the second half of a file.

    Raises:
        FileNotFoundError: it is gone.
    """
    os.truncate(file, math.floor(file.stat().st_size * _TOUCHED_IN_A_FILE))


def vanish(store: Path, seconds: float) -> None:
    """Move a store away, and back after some time. What is in its place by then is deleted.

    Raises:
        FileNotFoundError: it is gone already.
    """
    away = store.with_name(f"{store.name}{AWAY}")
    store.rename(away)
    _beside(_LATER + _BACK, seconds, store, away)


class Slowness:
    """Makes the work between two calls take ``factor`` times as long, in CPU time of this process."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._last = time.process_time()

    def __call__(self) -> None:
        """Wait in proportion to what was computed since the last call."""
        now = time.process_time()
        time.sleep(max(0.0, now - self._last) * (self._factor - 1))
        self._last = now


def _beside(code: str, *arguments: object) -> None:
    """Start Python outside of this machine and of its run."""
    start_outside([sys.executable, "-I", "-S", "-c"], code, *map(str, arguments), env={})


def below(pid: int) -> list[int]:
    """All processes below a process that belong to its machine."""
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                if not is_outside(int(child)):
                    found += [int(child), *below(int(child))]
    except OSError:  # it has ended
        pass
    return found
