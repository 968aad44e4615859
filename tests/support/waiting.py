"""Waits for what other processes do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

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
