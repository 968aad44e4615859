"""A store that is opened to be read: every attempt to write is an error."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from swift_ft.errors import StoreNotWritableError, SwiftError, first_line
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


def read_all(
    read: Callable[[A], B], places: Iterable[A], on_file: Callable[[int], None] = lambda count: None
) -> tuple[list[B], list[str]]:
    """Read many small files as :func:`read_at_once` does, and name the damaged ones among them.

    Args:
        read: reads one of them, or raises a `SwiftError` if it is damaged.
        places: where they are.
        on_file: called with the number of files that were read since the last call, by any thread.

    Returns:
        What was read, and what is wrong with the others, one line each.

    Raises:
        Exception: what a read has raised besides.
    """

    def tried(place: A) -> B | SwiftError:
        try:
            return read(place)
        except SwiftError as error:
            return error
        finally:
            on_file(1)

    results = read_at_once(tried, places)
    return (
        [result for result in results if not isinstance(result, SwiftError)],
        [first_line(result) for result in results if isinstance(result, SwiftError)],
    )


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
