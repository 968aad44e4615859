"""Ports that nobody uses, and waiting for servers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

START_S = 90.0


def free_ports(count: int, *offsets: int) -> list[int]:
    """Ports that are free now, and so are those ``offsets`` above each of them."""
    found: list[int] = []
    # Below the range out of which the system gives ports to connections of others.
    for port in range(21000 + time.time_ns() // 1000 % 1000, 32000):
        if all(_is_free(port + offset) for offset in (0, *offsets)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError("no free ports")


def is_listening(port: int) -> bool:
    """True if somebody accepts connections."""
    with socket.socket() as trial:
        trial.settimeout(5)
        return trial.connect_ex(("127.0.0.1", port)) == 0


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def wait_until(ready: Callable[[], bool], alive: Callable[[], bool], what: str) -> None:
    """Asks until a server is ready. Raises RuntimeError if it ended or the deadline passed."""
    deadline = time.monotonic() + START_S
    while not ready():
        if not alive():
            raise RuntimeError(f"{what} ended")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} was not ready within {START_S:g} s")
        time.sleep(0.05)
