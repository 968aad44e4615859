"""Says that a replacement's script began slowly, while all other workers waited for it, and what helps."""

from __future__ import annotations

import logging

_logger = logging.getLogger(__name__)

_SLOW_S = 1.0
"""Longer than the rest of a recovery without its replay."""


def say_if_slow(took_s: float, rank: int) -> None:
    """Log a line if a script took long before its session, in a worker that a recovery has started.

    Args:
        took_s: seconds; 0 in another worker.
        rank: the worker.
    """
    if took_s >= _SLOW_S:
        _logger.info(
            "worker %d: the script took %.1f s before its session, and all others waited for it: if that was "
            "for its imports, name them with swift-run --preload",
            rank,
            took_s,
            extra={"event": "script_began_slowly", "rank": rank},
        )
