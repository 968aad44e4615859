"""What each worker is doing right now, as published in the rendezvous store."""

from __future__ import annotations

import json
import time
from typing import Any

from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

__all__ = ["ProgressBoard"]


class ProgressBoard:
    """Publishes this worker's progress and reads that of all workers.

    The live view shows it, and a participant sees from it whether a replay still advances.

    Args:
        rendezvous: a client of the rendezvous store.
        writer: writes to that store.
        rank: this worker.
    """

    def __init__(self, rendezvous: RendezvousStore, writer: BackgroundWriter, rank: int) -> None:
        self._rendezvous = rendezvous
        self._writer = writer
        self._rank = rank

    def publish(self, iteration: int, mode: str, **facts: Any) -> None:
        """Replace what this worker published before. Returns at once.

        Args:
            iteration: iterations that it has completed.
            mode: what it is doing, such as ``live`` or ``replay``.
            facts: more for the live view, JSON-ready.
        """
        progress = {"iteration": iteration, "mode": mode, "at": time.time(), **facts}
        self._writer.set(_key(self._rank), json.dumps(progress))

    def read_all(self, world_size: int) -> dict[int, Any]:
        """The last progress of each worker that has published any, by rank."""
        return {
            rank: json.loads(self._rendezvous.get(_key(rank)))
            for rank in range(world_size)
            if self._rendezvous.check([_key(rank)])
        }


def _key(rank: int) -> str:
    return f"progress/{rank}"
