"""The current activity of each worker: it tells its agent, and relays pass it on to the rendezvous store.

    worker ──(its channel, with a heartbeat)──▶ agent ──(notes, at most once a second)──▶ heads ──▶ store

So training never waits for the store, however fast steps are, and the store gets one value for each group of
machines (`coordination/relay/notes.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from swift_ft.coordination.agent_channel import AgentChannel
from swift_ft.coordination.relay.notes import NotesReader
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_KEY = "progress/"


STANDS = "stands"
"""Of a worker's progress: where it has stood for too long."""


@dataclass(frozen=True, slots=True)
class Stand:
    """The place of a worker in an iteration that takes too long.

    Attributes:
        iteration: its number.
        place: the line of the script, and what it has called.
        waits: for other workers.
        stack: lines of the program, the innermost first.
        backward: it is in torch's engine, which may wait for the gradients of others.
    """

    iteration: int
    place: str
    waits: bool
    stack: tuple[str, ...]
    backward: bool = False


def standing(ranks: Iterable[int], progress: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Those of some workers whose progress says that they have stood at one place for too long."""
    return [rank for rank in ranks if STANDS in progress.get(rank, {})]


def without_places(progress: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The progress of workers alone: one that was asked where it stands has made none by that."""
    return {
        rank: {name: fact for name, fact in facts.items() if name != STANDS}
        for rank, facts in progress.items()
    }


def places_of(ranks: Iterable[int], progress: Mapping[int, Mapping[str, Any]]) -> tuple[str, ...]:
    """Places at which some workers have stood for too long, in words, of those that have said so.

    Args:
        ranks: their numbers, in the order of the words.
        progress: see :meth:`ProgressReader.read`.
    """
    stands = [(rank, progress[rank][STANDS]) for rank in standing(ranks, progress)]
    return tuple(
        f"worker {rank} is {' < '.join([stand['place'], *stand['stack'][1:]])}" for rank, stand in stands
    )


def progress_key(rank: int) -> str:
    """The key of the note that says what a worker does."""
    return f"{_KEY}{rank}"


class ProgressReader:
    """Reads the progress of all workers.

    Args:
        rendezvous: a client of the rendezvous store.
    """

    def __init__(self, rendezvous: RendezvousStore) -> None:
        self._notes = NotesReader(rendezvous)

    def read(self, machines: int) -> dict[int, Any]:
        """The last progress of each worker that has published any, by rank. From any thread.

        Args:
            machines: slots of the job.
        """
        notes = self._notes.read(machines)
        return {int(key.removeprefix(_KEY)): facts for key, facts in notes.items() if key.startswith(_KEY)}


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
        self._last: dict[str, Any] | None = None

    def publish(self, iteration: int, mode: str, **facts: Any) -> None:
        """Replace what this worker published before. Returns at once.

        Args:
            iteration: iterations that it has completed.
            mode: what it is doing, such as ``live`` or ``replay``. Another mode is told at once.
            facts: more for the live view, JSON-ready.
        """
        self._show({"iteration": iteration, "mode": mode, "at": time.time(), **facts})

    def add(self, **facts: Any) -> None:
        """Add to what this worker published last, until it publishes something else. From any thread.

        Args:
            facts: JSON-ready.
        """
        if self._last is not None:
            self._show({**self._last, **facts})

    def _show(self, shown: dict[str, Any]) -> None:
        self._last = shown
        if self._channel is not None:
            self._channel.show(self._rank, shown)

    def read_all(self, machines: int) -> dict[int, Any]:
        """The last progress of each worker that has published any, by rank.

        Args:
            machines: slots of the job.
        """
        return self._reader.read(machines)
