"""Times that callbacks have read from their host's clock, as durations: another host's is another one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from swift_ft.integrations.lightning.host import part

_callbacks = part("callbacks")

_CHECKED, _ELAPSED = "_last_time_checked", "elapsed"
OF_HOST = frozenset({_CHECKED})
"""Variables of Lightning's callbacks that no other worker takes as they are."""


def durations(callback: Any) -> dict[str, float]:
    """Seconds since a callback's times, and those that a timer has counted."""
    found = {}
    if isinstance(callback, _callbacks.ModelCheckpoint) and callback._last_time_checked is not None:
        found[_CHECKED] = time.monotonic() - callback._last_time_checked
    if isinstance(callback, _callbacks.Timer):
        found[_ELAPSED] = callback.time_elapsed()
    return found


def put_back_durations(callback: Any, seconds: Mapping[str, float]) -> None:
    """Give a callback times of this host's clock. A timer that has counted more goes on from there."""
    if _CHECKED in seconds:
        callback._last_time_checked = time.monotonic() - seconds[_CHECKED]
    if _ELAPSED in seconds:
        callback._offset += max(0.0, seconds[_ELAPSED] - callback.time_elapsed())
