"""A store that is opened to be read: every attempt to write is an error."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from swift_ft.errors import StoreNotWritableError
from swift_ft.storage.atomic_file import AtomicFile
from swift_ft.storage.store import Store


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

    def create_json(self, path: str, content: dict[str, Any]) -> bool:
        """Refuse."""
        self._refuse()

    def open_write(self, path: str) -> AtomicFile:
        """Refuse."""
        self._refuse()

    def upload(self, local: Path, path: str) -> None:
        """Refuse."""
        self._refuse()
