"""Free ports, and waiting for servers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

START_TIMEOUT_S = 300.0  # a JVM takes seconds on an idle machine, and minutes on one that is overloaded

# Below the range that Linux assigns to outgoing connections: such a port could be taken at any time.
_FIRST, _LAST = 20000, 32767
_reserved: dict[int, int] = {}  # port -> descriptor of its lock, held until this process ends


def free_ports(count: int, *offsets: int) -> list[int]:
    """Ports that are free, as are those ``offsets`` above each of them.

    They are reserved for this process while it lives. Test processes that choose at the same time get
    different ports, and a server that is killed finds its ports free when it is started again.
    """
    found: list[int] = []
    candidates = range(_FIRST, _LAST + 1 - max(offsets, default=0))
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        if _reserve([port + offset for offset in (0, *offsets)]):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError("no free ports")


def free_port(*, in_a_row: int = 1) -> int:
    """A free port, the first of several ``in_a_row``: see :func:`free_ports`."""
    return free_ports(1, *range(1, in_a_row))[0]


def is_listening(port: int) -> bool:
    """True if a server accepts connections at this port."""
    with socket.socket() as trial:
        trial.settimeout(5)
        return trial.connect_ex(("127.0.0.1", port)) == 0


def wait_until(ready: Callable[[], bool], alive: Callable[[], bool], what: str, log: Path) -> None:
    """Polls until a server is ready.

    Raises:
        RuntimeError: the server ended, or the timeout passed; with the end of its log.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready():
        problem = None
        if not alive():
            problem = f"{what} ended"
        elif time.monotonic() > deadline:
            problem = f"{what} was not ready within {START_TIMEOUT_S:g} s"
        if problem:
            raise RuntimeError(f"{problem}. The end of {log}:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)


def _reserve(ports: list[int]) -> bool:
    """Reserves all of these ports, or none."""
    locks: dict[int, int] = {}
    folder = Path(tempfile.gettempdir()) / "swift-ft-test-ports"
    folder.mkdir(exist_ok=True)
    for port in ports:
        if port in _reserved or not _is_free(port):
            break
        lock = os.open(folder / str(port), os.O_RDWR | os.O_CREAT, 0o666)
        locks[port] = lock
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another test process has it
            break
    else:
        _reserved.update(locks)
        return True
    for lock in locks.values():
        os.close(lock)
    return False


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do
        with contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return True
    return False
