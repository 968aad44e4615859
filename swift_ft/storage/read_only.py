"""A store that is opened to be read: every attempt to write is an error."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from swift_ft.errors import StoreNotWritableError
from swift_ft.storage.atomic_file import AtomicFile
from swift_ft.storage.store import Store

_READERS = 16
"""Threads. A small file costs a round trip, most of which is waiting."""

A = TypeVar("A")
B = TypeVar("B")


def read_at_once(read: Callable[[A], B], places: Iterable[A]) -> list[B]:
    """Read many small files, several at a time. Returns what was read, in the order of the places.

    Raises:
        Exception: what the first failing read raised.
    """
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(read, places))


class ReadOnlyStore(Store):
    """A store of which nothing changes. Takes the arguments of :class:`Store`."""

    def _refuse(self) -> NoReturn:
        raise StoreNotWritableError(f"{self.url} is opened to be read only.", path=self.url)

    def probe(self, patience_s: float | None = None) -> None:
        """Refuse: there is nothing to be written."""
        self._refuse()

    def delete(self, path: str, recursive: bool = False) -> None:
        """Refuse."""
        self._refuse()

    def delete_all(self) -> None:
        """Refuse."""
        self._refuse()

    def sweep(self, directory: str, is_dead: Callable[[str], bool] = lambda name: True) -> builtins.list[str]:
        """Refuse."""
        self._refuse()

    def abort_uploads(self, directory: str) -> None:
        """Refuse."""
        self._refuse()

    def write_json(self, path: str, content: dict[str, Any]) -> None:
        """Refuse."""
        self._refuse()

    def open_write(self, path: str) -> AtomicFile:
        """Refuse."""
        self._refuse()

    def upload(self, local: Path, path: str) -> None:
        """Refuse."""
        self._refuse()
