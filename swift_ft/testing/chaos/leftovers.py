"""Things that a run has left on its host: processes, shared memory, temporary files and sockets."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")

MARK = "SWIFT_CHAOS_FOLDER"
"""The variable by which all processes of a run are known, those that lost their parents, too."""

_SHARED_MEMORY = Path("/dev/shm")
_SETTLED_S = 5.0
"""A process that has lost its parent may still be about to end, and to delete what it had."""
_LOOK_S = 0.1
_EXCUSED = ("pymp-", "torchinductor_", "torch_shm_")
"""Names that libraries leave in the folder of temporary files when a process is killed."""


def shared_memory() -> frozenset[str]:
    """The names of all that is in the host's shared memory."""
    if not _SHARED_MEMORY.is_dir():
        return frozenset()
    return frozenset(path.name for path in _SHARED_MEMORY.iterdir())


def left_by(folder: Path, temporary: Path, before: frozenset[str], *, killed: bool) -> list[str]:
    """All that a run has left, in words. Its processes are ended.

    Args:
        folder: of the run: the value of :data:`MARK`.
        temporary: its folder of temporary files.
        before: what was in shared memory when it began.
        killed: processes of it were killed on purpose, in which whatever they had for a moment stays.
    """
    found = [f"process {pid} ({_command(pid)})" for pid in _settled(lambda: processes_of(folder))]
    end_processes(folder)
    found += [f"/dev/shm/{name}" for name in _settled(lambda: _unused(shared_memory() - before))]
    excused = (*_EXCUSED, *["tmp"] * killed)
    for path in sorted(temporary.rglob("*")):
        top = path.relative_to(temporary).parts[0]
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
        if not top.startswith(excused) and (is_socket or path.parent == temporary):
            found.append(f"{'socket' if is_socket else 'temporary file'} {path.relative_to(temporary)}")
    return found


def _settled(look: Callable[[], list[_T]]) -> list[_T]:
    """All that is still found after a while."""
    deadline = time.monotonic() + _SETTLED_S
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return found


def processes_of(folder: Path) -> list[int]:
    """All processes of a run, those that have lost their parents, too.

    Args:
        folder: of the run: the value of :data:`MARK`.
    """
    mark = f"{MARK}={folder}\0".encode()
    found = []
    for entry in _processes():
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def end_processes(folder: Path) -> None:
    """Kill all processes of a run.

    Args:
        folder: of the run: the value of :data:`MARK`.
    """
    for pid in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "ended since"


def _unused(names: frozenset[str]) -> list[str]:
    """Those that no living process has open or mapped: other programs of this host use their own."""
    left = set(names)
    for entry in _processes():
        if not left:
            break
        with contextlib.suppress(OSError):
            maps = (entry / "maps").read_text(errors="replace")
            left -= {name for name in left if f"/dev/shm/{name}" in maps}
            targets = {str(path.readlink()) for path in (entry / "fd").iterdir()}
            left -= {name for name in left if f"/dev/shm/{name}" in targets}
    return sorted(left)


def _processes() -> Iterator[Path]:
    return (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())
