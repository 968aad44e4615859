"""The folder in this host's memory in which the workers of a machine offer their states to the next world.

Files there outlive their process. So the folder has the number of the agent's process, and the standby
deletes it when the agent is gone, for whatever reason.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")


def handover_memory(agent_pid: int, machine: str, world: int) -> Path:
    """The folder for a world's number, on the disk of temporary files where a host has no shared memory."""
    return _root() / f"swift-ft-{agent_pid}-{machine}-w{world}"


def free_handover_memory(agent_pid: int) -> None:
    """Delete all that workers of an agent have offered. None of them reads or writes there any more."""
    for folder in _root().glob(f"swift-ft-{agent_pid}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _root() -> Path:
    return _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
