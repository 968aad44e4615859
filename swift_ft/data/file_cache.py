"""Files of samples on this machine's disk, fetched from the nearest place that has them.

    FOLDER/5f0c...        the file of this digest, complete: it has appeared under its name when it was

All workers of a machine, and the processes that load their batches, may share a folder: one of them fetches a
file, and the others wait for it.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from swift_ft.data.file_index import DataFile
from swift_ft.errors import GaveUpError, UsageError, first_line
from swift_ft.observe.waits import waiting
from swift_ft.storage.digest import Digester
from swift_ft.storage.store import Store

_logger = logging.getLogger(__name__)

_COPY_BYTES = 4 << 20
_AT_ONCE = 2
"""Files that are fetched in advance at the same time."""
_FETCH_S = 600.0
"""The longest wait for another process to fetch a file."""


@dataclass(slots=True)
class FetchedBytes:
    """Bytes of files that this process has fetched, by origin."""

    peers: int = 0
    store: int = 0


class Peers:
    """Other machines that may have a file. Here there are none.

    Attributes:
        any: there are some.
    """

    any = False

    def open(self, file: DataFile) -> IO[bytes]:
        """A copy of a file. Raises OSError if none can be had."""
        raise FileNotFoundError(file.path)

    def offer(self, file: DataFile, place: Path) -> None:
        """Say that a file is here now, and where."""


class FileCache:
    """Copies of a folder's files.

    Args:
        folder: on this machine's disk.
        limit_bytes: the copies that were not used for longest are deleted beyond it. None to keep all.

    Attributes:
        fetched: by this process.
        peers: other machines, which are asked before the folder.
    """

    def __init__(self, url: str, folder: Path, limit_bytes: int | None) -> None:
        self._url = url
        self._folder = folder
        self._limit_bytes = limit_bytes
        self.fetched = FetchedBytes()
        self.peers = Peers()
        self._of_process: _OfProcess | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_of_process": None, "peers": Peers()}

    @property
    def _own(self) -> _OfProcess:
        """A process that was forked has connections and threads of its own."""
        if self._of_process is None or self._of_process.pid != os.getpid():
            if self._of_process is not None:
                self.peers = Peers()  # they are known to the process that trains
            threads = ThreadPoolExecutor(_AT_ONCE, "swift_ft files")
            self._of_process = _OfProcess(os.getpid(), Store(self._url), threads, set())
        return self._of_process

    def prefetch(self, files: Iterable[DataFile]) -> None:
        """Fetch files in the background, in this order. Who needs one that fails learns why when it does."""
        own = self._own
        for file in files:
            if file.content.digest not in own.begun:
                own.begun.add(file.content.digest)
                own.threads.submit(self._in_advance, file)

    def _in_advance(self, file: DataFile) -> None:
        try:
            self.fetch(file)
        except Exception as error:
            _logger.info(
                "%s was not fetched in advance: %s",
                file.path,
                first_line(error),
                extra={"event": "samples_not_prefetched"},
            )

    def fetch(self, file: DataFile) -> Path:
        """The copy of a file, which is fetched if need be.

        Raises:
            UsageError: the file is not the one that was indexed.
            OSError: it cannot be read.
            GaveUpError: another process did not fetch it in time.
        """
        own, place = self._own, self._folder / file.content.digest
        own.begun.add(file.content.digest)
        if not place.is_file():
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(f"{place}.lock", timeout=_FETCH_S, is_singleton=False)
            try:
                with waiting(f"another process to fetch {file.path}", _FETCH_S):
                    lock.acquire()
            except Timeout as error:
                raise GaveUpError(
                    f"Another process did not fetch {file.path} from {own.store.url} within {_FETCH_S:g} s."
                ) from error
            try:
                if not place.is_file():
                    self._fetch(file, place)
            finally:
                lock.release()
            self._make_room(place)
        with suppress(OSError):
            os.utime(place)  # used last
        if self.peers.any:
            own.threads.submit(self.peers.offer, file, place)
        return place

    def _fetch(self, file: DataFile, place: Path) -> None:
        """From another machine, or from the folder, where a damage must be found twice."""
        try:
            with self.peers.open(file) as copy:
                if self._take(copy, file, place):
                    self.fetched.peers += file.content.size
                    return
        except FileNotFoundError:
            pass
        except OSError as error:
            _logger.info(
                "No other machine gives %s (%s): it is read from the store.",
                file.path,
                first_line(error),
                extra={"event": "samples_not_from_peer"},
            )
        store = self._own.store
        for _ in range(2):
            self.fetched.store += file.content.size
            if self._take(store.read_pieces(file.path), file, place):
                return
        raise UsageError(
            f"{file.path} in {store.url} is not the file that was indexed: it has changed, or is damaged. "
            "Put the old file back; or call swift_ft.data.write_index(), and begin a new run."
        )

    def _take(self, source: IO[bytes] | Iterable[memoryview], file: DataFile, place: Path) -> bool:
        """Copy a file to its place, if it is what was indexed."""
        digester = Digester()
        pieces = iter(lambda: source.read(_COPY_BYTES), b"") if hasattr(source, "read") else source
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix="begun-", delete=False) as copy:
            try:
                for piece in pieces:
                    digester.update(piece)
                    copy.write(piece)
                copy.flush()
                if intact := digester.digest() == file.content:
                    Path(copy.name).replace(place)
            finally:
                Path(copy.name).unlink(missing_ok=True)
        return intact

    def _make_room(self, newest: Path) -> None:
        """Delete what was not used for longest. Who has such a file open may go on reading it."""
        if self._limit_bytes is None:
            return
        copies = []
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):
                if path.suffix != ".lock" and not path.name.startswith("begun-"):
                    copies.append((path.stat().st_mtime, path.stat().st_size, path))
        left = sum(size for _, size, _ in copies)
        for _, size, path in sorted(copies):
            if left <= self._limit_bytes:
                return
            if path != newest:
                path.unlink(missing_ok=True)
                self._own.begun.discard(path.name)
                left -= size

    def close(self) -> None:
        """Wait for what has begun, and fetch nothing more in advance."""
        if self._of_process is not None and self._of_process.pid == os.getpid():
            self._of_process.threads.shutdown()
            self._of_process = None

    def check_room(self, files: Iterable[DataFile]) -> None:
        """Raise UsageError if the limit is less than the two largest files."""
        largest = sum(sorted((file.content.size for file in files), reverse=True)[:2])
        if self._limit_bytes is not None and self._limit_bytes < largest:
            raise UsageError(
                f"cache_bytes={self._limit_bytes} is less than the two largest files of {self._url} "
                f"({largest} bytes): give more, or make smaller files."
            )


@dataclass(slots=True)
class _OfProcess:
    """The connections and threads that a process must not share with one that it forks."""

    pid: int
    store: Store
    threads: ThreadPoolExecutor
    begun: set[str]  # digests of files that are here, or on their way
