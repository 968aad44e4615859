"""Files of checkpoints that are nearer than the store: on this machine's disk, or on another machine's.

    LOCAL/parts-1f3a…/00000020/rank-00001.g00002/__0_0.distcp       a copy of that file in the store

The folder of a store has the store's digest in its name. Which bytes a file must have is known from the
checkpoint's marker, so a copy is either the file that was saved, or it is not used.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from swift_ft.errors import DamagedCheckpointError, first_line
from swift_ft.storage.digest import FileDigest, digest_of_file, digest_of_json
from swift_ft.torch_adapters.dcp.verified_files import check_digest

_logger = logging.getLogger(__name__)

OpensFile = Callable[[str], IO[bytes]]
"""Opens a file by its path in the store. Raises OSError if it cannot be had."""


@dataclass(slots=True)
class LoadedBytes:
    """Bytes of a checkpoint's files that were read, by where they came from."""

    own_disk: int = 0
    peers: int = 0
    store: int = 0


class LocalParts:
    """Copies on this machine's disk. All of its workers share them.

    Args:
        local: the machine's folder.
        store_url: of the store that has the originals.
    """

    def __init__(self, local: Path, store_url: str) -> None:
        self._root = local / f"parts-{digest_of_json({'store': store_url})[:16]}"

    @contextmanager
    def written(self, path: str) -> Iterator[Callable[[Any], object]]:
        """Write a copy: the function takes the next bytes. If the disk fails, there is no copy."""
        copy = _Copy(self._place(path))
        try:
            yield copy.write
        finally:
            copy.close()
        if copy.error is not None:
            _logger.warning(
                "There is no copy of %s on the local disk (%s): it will be read from the store.",
                path,
                copy.error,
                extra={"event": "part_not_copied"},
            )

    def find(self, path: str) -> Path:
        """The copy of a file. Raises FileNotFoundError if there is none."""
        place = self._place(path)
        if not place.is_file():
            raise FileNotFoundError(path)
        return place

    def parts(self) -> list[str]:
        """The parts of which there are files, by their path in the store."""
        return sorted(f"checkpoints/{p.parent.name}/{p.name}" for p in self._root.glob("*/rank-*"))

    def drop_before(self, iteration: int) -> None:
        """Delete the copies of older checkpoints."""
        for folder in self._root.glob("*"):
            if folder.name.isdigit() and int(folder.name) < iteration:
                shutil.rmtree(folder, ignore_errors=True)  # another worker of this machine may do the same

    def _place(self, path: str) -> Path:
        _, *names = path.split("/")
        if len(names) != 3 or ".." in names:
            raise FileNotFoundError(path)
        return self._root.joinpath(*names)


class _Copy:
    """A file on the local disk. Its first failure is its last: then it is deleted."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._file: IO[bytes] | None = None
        self.error: OSError | None = None
        with self._noted():
            place.parent.mkdir(parents=True, exist_ok=True)
            self._file = place.open("wb")

    def write(self, data: Any) -> None:
        if self._file is not None and self.error is None:
            with self._noted():
                self._file.write(data)

    def close(self) -> None:
        if self._file is not None:
            with self._noted():
                self._file.close()
        if self.error is not None:
            with suppress(OSError):
                self._place.unlink()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error


class PartFiles:
    """Opens a checkpoint's files, from the nearest place that has them as they were saved.

    Args:
        local: copies on this machine; None if there are none.

    Attributes:
        peer: opens a copy on another machine; None if no machine serves any.
        loaded: bytes that were read, by origin.
    """

    def __init__(self, local: LocalParts | None) -> None:
        self.local = local
        self.peer: OpensFile | None = None
        self.loaded = LoadedBytes()

    def take_loaded(self) -> LoadedBytes:
        """Bytes that were read since the last call."""
        loaded, self.loaded = self.loaded, LoadedBytes()
        return loaded

    def nearer(self, path: str, expected: FileDigest | None) -> IO[bytes] | None:
        """A copy of a file that is nearer than the store, at its beginning; None if there is none.

        Args:
            path: in the store.
            expected: what the file has to be; None if that is not known. Then no copy is used.
        """
        if expected is None:
            return None
        if (file := self._opened(path, expected, self._open_local)) is not None:
            self.loaded.own_disk += expected.size
        elif (file := self._opened(path, expected, self._open_peer)) is not None:
            self.loaded.peers += expected.size
        return file

    def _open_local(self, path: str) -> IO[bytes]:
        if self.local is None:
            raise FileNotFoundError(path)
        return self.local.find(path).open("rb")

    def _open_peer(self, path: str) -> IO[bytes]:
        if self.peer is None:
            raise FileNotFoundError(path)
        return self.peer(path)

    def _opened(self, path: str, expected: FileDigest, opener: OpensFile) -> IO[bytes] | None:
        """The file, if it can be had, and is what was saved."""
        try:
            file = opener(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(path, error)
            return None
        try:
            check_digest(path, digest_of_file(file), expected)
            file.seek(0)
        except (OSError, DamagedCheckpointError) as error:
            file.close()
            self._warn(path, error)
            return None
        return file

    def _warn(self, path: str, error: Exception) -> None:
        _logger.warning(
            "A near copy of %s cannot be used (%s): the next place that has it is asked.",
            path,
            first_line(error),
            extra={"event": "part_copy_unusable"},
        )

    def from_store(self, size: int) -> None:
        """Count a file that was read from the store."""
        self.loaded.store += size
