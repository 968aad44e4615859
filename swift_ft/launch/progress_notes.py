"""Publishes what the workers of one machine do: once a second at most, and at once if it is another thing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.coordination.progress import progress_key, progress_text

__all__ = ["ProgressNotes"]

_EVERY_S = 1.0


class ProgressNotes:
    """Owner: the agent's main thread, which never waits for the store.

    Args:
        writer: writes to the rendezvous store.
        clock: monotonic seconds.
    """

    def __init__(self, writer: BackgroundWriter, clock: Callable[[], float] = time.monotonic) -> None:
        self._writer = writer
        self._clock = clock
        self._published: tuple[int, dict[int, dict[str, Any]]] | None = None
        self._at = 0.0

    def look(self, slot: int | None, shown: Mapping[int, dict[str, Any]]) -> None:
        """Publish what is new, if it is time. Called again and again.

        Args:
            slot: of this machine; None for a spare.
            shown: what each worker said last, by rank.
        """
        if slot is None or not shown or (slot, shown) == self._published:
            return
        before = self._published
        same = before is not None and before[0] == slot and _modes(before[1]) == _modes(shown)
        if same and self._clock() < self._at + _EVERY_S:
            return
        self._published, self._at = (slot, dict(shown)), self._clock()
        self._writer.set(progress_key(slot), progress_text(shown))


def _modes(shown: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
    return {rank: facts.get("mode") for rank, facts in shown.items()}
