"""What each worker is doing right now. It tells its agent, which publishes it in the rendezvous store.

    worker ──(its channel, with a heartbeat)──▶ agent ──(at most once a second)──▶ progress/of/SLOT

So training never waits for the store, and the store gets one value for each machine, however fast steps are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from swift_ft.coordination.agent_channel import AgentChannel
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.waits import waiting

__all__ = ["ProgressBoard", "ProgressReader", "progress_key", "progress_text"]


def progress_key(slot: int) -> str:
    """Where the progress of a slot's workers is."""
    return f"progress/of/{slot}"


def progress_text(of_ranks: Mapping[int, Mapping[str, Any]]) -> str:
    """The progress of a machine's workers, by rank, as it is published."""
    return json.dumps({str(rank): facts for rank, facts in of_ranks.items()})


class ProgressReader:
    """Reads the progress of all workers, in two exchanges once all machines have published any.

    Args:
        rendezvous: a client of the rendezvous store.
    """

    def __init__(self, rendezvous: RendezvousStore) -> None:
        self._rendezvous = rendezvous
        self._known: frozenset[int] = frozenset()  # slots with a value, which is never deleted

    def read(self, machines: int) -> dict[int, Any]:
        """The last progress of each worker that has published any, by rank. From any thread.

        Args:
            machines: slots of the job.
        """
        self._look_for([slot for slot in range(machines) if slot not in self._known])
        if not (known := sorted(self._known)):
            return {}
        with waiting("the rendezvous store to say what all workers do"):
            texts = self._rendezvous.multi_get([progress_key(slot) for slot in known])
        return {int(rank): facts for text in texts for rank, facts in json.loads(text).items()}

    def _look_for(self, slots: list[int]) -> None:
        if slots and self._is_there(*slots):
            self._known |= {*slots}
        else:
            self._known |= {slot for slot in slots if self._is_there(slot)}

    def _is_there(self, *slots: int) -> bool:
        return self._rendezvous.check([progress_key(slot) for slot in slots])


class ProgressBoard:
    """Publishes this worker's progress and reads that of all workers.

    The live view shows it, and a participant sees from it whether a replay still advances.

    Args:
        channel: to this worker's agent; None where there is none to tell.
        reader: of all workers' progress.
        rank: this worker.
    """

    def __init__(self, channel: AgentChannel | None, reader: ProgressReader, rank: int) -> None:
        self._channel = channel
        self._reader = reader
        self._rank = rank

    def publish(self, iteration: int, mode: str, **facts: Any) -> None:
        """Replace what this worker published before. Returns at once.

        Args:
            iteration: iterations that it has completed.
            mode: what it is doing, such as ``live`` or ``replay``. Another mode is told at once.
            facts: more for the live view, JSON-ready.
        """
        if self._channel is not None:
            shown = {"iteration": iteration, "mode": mode, "at": time.time(), **facts}
            self._channel.show(self._rank, shown)

    def read_all(self, machines: int) -> dict[int, Any]:
        """The last progress of each worker that has published any, by rank.

        Args:
            machines: slots of the job.
        """
        return self._reader.read(machines)
