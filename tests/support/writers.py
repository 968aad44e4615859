"""A background writer that has no background: it does all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swift_ft.coordination.background_writer import BackgroundWriter


class AtOnce(BackgroundWriter):
    """Writes in the thread that asks for it.

    Args:
        rendezvous: what it writes to; anything with the methods that the test needs.
    """

    def __init__(self, rendezvous: Any) -> None:
        self._rendezvous = rendezvous
        self._lost = False

    def set(self, key: str, value: str) -> None:
        """Set a key now."""
        self._rendezvous.set(key, value)

    def delete(self, key: str) -> None:
        """Delete a key now."""
        self._rendezvous.delete_key(key)

    def do(self, errand: Callable[[], object]) -> None:
        """Do it now."""
        errand()

    def flush(self, timeout_s: float) -> bool:
        """Nothing waits."""
        return True
