"""The published digests of a worker's batches, which its replacement reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swift_ft.config import store_keys
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_CHUNK = 64
"""Iterations under one key of the rendezvous store."""


@dataclass(slots=True)
class FirstBatch:
    """What is known of the first batch that a rank was given.

    Attributes:
        iteration: it was given for.
        varies: a later batch was another one.
    """

    iteration: int
    digest: str
    varies: bool = False


class BatchBoard:
    """Publishes the digests of one worker's batches in the rendezvous store.

    Args:
        rendezvous: a client of the rendezvous store.
        writer: writes to that store.
        rank: the worker.
        joined: an earlier worker of this rank may have published some.
    """

    def __init__(
        self, rendezvous: RendezvousStore, writer: BackgroundWriter, rank: int, *, joined: bool
    ) -> None:
        self._rendezvous = rendezvous
        self._writer = writer
        self._joined = joined
        self._rank = rank
        self._chunks: dict[int, dict[str, list[str]]] = {}
        last = self._read(store_keys.last_batches(rank))  # the earlier worker has published none after it
        self._last_read = last["chunk"] if last is not None else -1
        self._last_written = self._last_read
        known = self._read(store_keys.first_batch(rank))
        self._first = FirstBatch(**known) if known is not None else None

    @property
    def first(self) -> FirstBatch | None:
        """The first batch of this rank; None if there was none."""
        return self._first

    def of(self, iteration: int, shares: Sequence[int] = ()) -> list[str]:
        """The digests of an iteration's batches, in the order in which they were given.

        Args:
            iteration: that is repeated, perhaps.
            shares: of the replicas in it; empty if they are those of the beginning.
        """
        return self._chunk(iteration).get(_name(iteration, shares), [])

    def publish(self, iteration: int, digest: str, shares: Sequence[int] = ()) -> None:
        """Add the digest of a batch. Returns at once."""
        chunk = self._chunk(iteration)
        chunk.setdefault(_name(iteration, shares), []).append(digest)
        if iteration // _CHUNK > self._last_written:
            self._last_written = iteration // _CHUNK
            # Before the chunk itself.
            self._write(store_keys.last_batches(self._rank), {"chunk": self._last_written})
        self._write(store_keys.batches(self._rank, iteration // _CHUNK), chunk)
        if self._first is None:
            self._first = FirstBatch(iteration, digest)
        elif digest == self._first.digest or self._first.varies:
            return
        else:
            self._first.varies = True
        self._write(store_keys.first_batch(self._rank), asdict(self._first))

    def drop_before(self, iteration: int) -> None:
        """Forget the batches of iterations that will not be repeated."""
        for number in [n for n in self._chunks if (n + 1) * _CHUNK <= iteration]:
            del self._chunks[number]
            self._writer.delete(store_keys.batches(self._rank, number))

    def _chunk(self, iteration: int) -> dict[str, list[str]]:
        number = iteration // _CHUNK
        if number not in self._chunks:
            known = self._read(store_keys.batches(self._rank, number)) if number <= self._last_read else None
            self._chunks[number] = known or {}
        return self._chunks[number]

    def _read(self, key: str) -> dict[str, Any] | None:
        """What an earlier worker of this rank has published."""
        if not self._joined or not self._rendezvous.check([key]):
            return None
        found: dict[str, Any] = json.loads(self._rendezvous.get(key))
        return found

    def _write(self, key: str, value: dict[str, Any]) -> None:
        self._writer.set(key, json.dumps(value))


def _name(iteration: int, shares: Sequence[int]) -> str:
    return f"{iteration}:{','.join(map(str, shares))}" if shares else str(iteration)
