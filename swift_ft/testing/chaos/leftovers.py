"""Things that a run has left on its host: processes, shared memory, temporary files and sockets."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")

MARK = "SWIFT_CHAOS_FOLDER"
"""The variable by which all processes of a run are known, those that lost their parents, too."""

_SHARED_MEMORY = Path("/dev/shm")
_SETTLED_S = 5.0
"""A process that has lost its parent may still be about to end, and to delete what it had."""
_LOOK_S = 0.1
_OURS = ("swift-", ".swift-")
"""Names of swift_ft in the folder of temporary files. All others are the script's and its libraries': under
torchrun they stay as well, and who is killed leaves them."""
_KIND = re.compile(r"[^\W\d_]*\W?_?")
"""The part of a name that says who made it: what follows is drawn, or the number of a process."""


@dataclass(frozen=True, slots=True)
class Left:
    """All that a run has left.

    Attributes:
        found: in words.
        kinds: of names in shared memory: those of an undisturbed run are the script's own.
    """

    found: list[str] = field(default_factory=list)
    kinds: frozenset[str] = frozenset()


def shared_memory() -> frozenset[str]:
    """The names of all that this user has in the host's shared memory.

    Whether files of other users are in use cannot be seen.
    """
    found = set()
    for path in _SHARED_MEMORY.glob("*"):
        with contextlib.suppress(OSError):  # it is gone since
            if path.lstat().st_uid == os.getuid():
                found.add(path.name)
    return frozenset(found)


def left_by(folder: Path, temporary: Path, before: frozenset[str], own: frozenset[str] | None) -> Left:
    """All that a run has left. Its processes are ended.

    Args:
        folder: of the run: the value of :data:`MARK`.
        temporary: its folder of temporary files.
        before: what was in shared memory when it began.
        own: kinds of names that its script leaves in shared memory; None if this run tells.
    """
    found = [f"process {pid} ({_command(pid)})" for pid in _settled(lambda: processes_of(folder))]
    end_processes(folder)
    shared = _settled(lambda: _unused(shared_memory() - before))
    kinds = frozenset(map(_kind, shared))
    found += [f"/dev/shm/{name}" for name in shared if own is not None and _kind(name) not in own]
    for path in sorted(temporary.iterdir()):
        if path.name.startswith(_OURS):
            is_socket = stat.S_ISSOCK(path.lstat().st_mode)
            found.append(f"{'socket' if is_socket else 'temporary file'} {path.name}")
    return Left(found, kinds)


def _kind(name: str) -> str:
    found = _KIND.match(name)
    return found[0] if found else ""


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
