"""All processes of one machine of a run, found by a variable that they were started with.

Those that measure and the scripts that are measured both look for them: no import of the scripts' model here.
"""

from __future__ import annotations

import os
from pathlib import Path

MACHINE = "PEERS_MACHINE"
"""The variable by which all processes of a machine are found, also those that have no parent any more."""


def processes_with(variable: str, value: str) -> list[int]:
    """Processes that were started with this variable, but this one."""
    wanted = f"{variable}={value}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if wanted in environment.split(b"\0") and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found
