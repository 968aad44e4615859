"""Writes to the rendezvous store that training does not wait for."""

from __future__ import annotations

import threading

from torch.distributed import DistError

from swift_ft.errors import RendezvousLostError
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

__all__ = ["BackgroundWriter"]


class BackgroundWriter:
    """Sets and deletes keys of the rendezvous store in a thread of its own.

    Of several values for one key that wait to be written, only the newest is.

    Args:
        rendezvous: a client of the rendezvous store.
    """

    def __init__(self, rendezvous: RendezvousStore) -> None:
        self._rendezvous = rendezvous
        self._waiting: dict[str, str | None] = {}  # guarded by the condition
        self._changed = threading.Condition()
        threading.Thread(target=self._write_all, name="swift-background-writer", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        """Set a key. Returns at once."""
        self._put(key, value)

    def delete(self, key: str) -> None:
        """Delete a key, if it is there. Returns at once."""
        self._put(key, None)

    def _put(self, key: str, value: str | None) -> None:
        with self._changed:
            self._waiting.pop(key, None)  # the order of keys is that of their newest values
            self._waiting[key] = value
            self._changed.notify()

    def _next(self) -> tuple[str, str | None]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            key = next(iter(self._waiting))
            return key, self._waiting.pop(key)

    def _write_all(self) -> None:
        try:
            while True:
                key, value = self._next()
                if value is None:
                    self._rendezvous.delete_key(key)
                else:
                    self._rendezvous.set(key, value)
        except (DistError, RuntimeError, RendezvousLostError):
            return  # the thread that follows the journal learns of the same loss, and reports it
