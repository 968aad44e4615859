"""The journal: one totally ordered list of events in the rendezvous store, which every participant reads.

Entry n is written by compare-and-set from absent, so two writers never share a position and no position stays
empty. Readers block in the store until the next entry is there; none of them polls. Each participant runs the
pure protocol over the entries, so all of them hold the same state at the same position.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError

from swift_ft.errors import RendezvousLostError, first_line
from swift_ft.recovery.events import Entry, Event, event_from_dict, event_to_dict
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

__all__ = ["Journal"]

_FOREVER = timedelta(days=365)


class Journal:
    """Appends to the journal and reads it.

    Args:
        connect: opens the journal's own client of the rendezvous store, since its reads wait without a limit.
        by: the name under which this participant writes.
    """

    def __init__(self, connect: Callable[[], RendezvousStore], *, by: str) -> None:
        self._by = by
        self._nonce = f"{socket.gethostname()}:{os.getpid()}"
        self._serial = itertools.count()
        self._rendezvous = connect()
        self._rendezvous.set_timeout(_FOREVER)
        self._lock = threading.Lock()
        self._tail = 0  # a position that is not after the first free one; guarded by the lock

    def append(self, event: Event) -> int:
        """Write an event after the last one and return its position.

        Raises:
            RendezvousLostError: if the store does not answer.
        """
        entry = {
            **event_to_dict(event),
            "at": time.time(),
            "by": self._by,
            "nonce": f"{self._nonce}:{next(self._serial)}",
        }
        text = json.dumps(entry, separators=(",", ":"))
        with self._lock:
            try:
                while self._rendezvous.compare_set(_key(self._tail), "", text).decode() != text:
                    self._tail += 1
            except (DistError, RuntimeError) as error:
                raise _lost(error) from error
            self._tail += 1
            return self._tail - 1

    def read(self, position: int) -> Entry:
        """Wait for the entry at a position.

        Raises:
            RendezvousLostError: if the store does not answer.
        """
        try:
            data = json.loads(self._rendezvous.get(_key(position)))
        except (DistError, RuntimeError) as error:
            raise _lost(error) from error
        with self._lock:
            self._tail = max(self._tail, position + 1)
        return Entry(position, event_from_dict(data), data["at"], data["by"])

    def has(self, position: int) -> bool:
        """Whether there is an entry at a position."""
        try:
            with self._lock:
                return bool(self._rendezvous.check([_key(position)]))
        except (DistError, RuntimeError) as error:
            raise _lost(error) from error


def _key(position: int) -> str:
    return f"journal/{position}"


def _lost(error: Exception) -> RendezvousLostError:
    return RendezvousLostError(
        f"The rendezvous store does not answer ({first_line(error)}). "
        "Start it again and resume from the last checkpoint with --resume."
    )
