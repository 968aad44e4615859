"""Waits for what other processes do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["free_port", "wait_until"]

_TICK_S = 0.02


def wait_until(condition: Callable[[], Any], what: str | Callable[[], str], deadline_s: float = 60.0) -> Any:
    """Look again and again until a condition holds, and return what it found.

    Raises:
        TimeoutError: with ``what``, or what it then says, after the deadline.
    """
    for _ in range(int(deadline_s / _TICK_S)):
        if found := condition():
            return found
        threading.Event().wait(_TICK_S)
    raise TimeoutError(what() if callable(what) else what)


def free_port() -> int:
    """A port of this host that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
