"""Two tiers: a segment is written to the local disk, and shipped to the store behind the writer's back.

A store that is down, slow or busy costs local disk and no training: segments stay here until they are there.
They are shipped in their order, so that what the store holds is always a beginning of the log.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO

import pyarrow as pa

from swift_ft.errors import SwiftError
from swift_ft.logging.choice import CodecChoice
from swift_ft.logging.disk import DiskUse
from swift_ft.logging.options import LogOptions, Ship
from swift_ft.logging.segment import SegmentName, parse_segment_name
from swift_ft.logging.store import Store

__all__ = ["LogTimeoutError", "Shipper", "Spool"]

_PREFIX = "swift-ft-spool-"
_RETRY_S = 1.0  # the store itself was patient before


class LogTimeoutError(SwiftError, TimeoutError):
    """The store did not take the log in time."""


class Spool:
    """A folder on the local disk for files on their way. It goes with its process.

    Those of processes that were killed are removed.

    Args:
        parent: where; the system's place for temporary files if None.

    Attributes:
        path: the folder.
        close: removes it, and all in it.
    """

    def __init__(self, parent: Path | None = None) -> None:
        place = parent or Path(tempfile.gettempdir())
        place.mkdir(parents=True, exist_ok=True)
        _sweep(place)
        new = Path(tempfile.mkdtemp(prefix="swift-ft-new-", dir=place))
        # The system lets go of the lock when this process ends, in whatever way.
        self._lock = (new / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = new.rename(new.with_name(new.name.replace("swift-ft-new-", _PREFIX)))
        self.close = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())


def _remove(folder: Path, lock: TextIO, owner: int) -> None:
    if os.getpid() == owner:  # a forked child that ends has no business here
        shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def _sweep(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        # Somebody else's, or removed by a neighbour that sweeps, too.
        with contextlib.suppress(OSError), (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


class Shipper:
    """Ships one log directory, whose one writer is this process.

    Errors of the store are kept and told by :meth:`flush`; nothing is given up. Temporary files that a dead
    writer left in the directory are deleted.

    Args:
        store: where segments go.
        directory: the log's directory there.
        options: budget, when to ship, and in which folder the local tier is.
        choice: is told how fast the store takes segments.
        keep: segments stay here when they are in the store, until they are dropped or their room is needed.

    Attributes:
        local: where the log is written.
        disk: what the local tier takes.
    """

    def __init__(
        self, store: Store, directory: str, options: LogOptions, choice: CodecChoice, *, keep: bool = False
    ) -> None:
        self._store = store
        self._directory = directory
        self._choice = choice
        self._keep = keep
        self.disk = DiskUse(options.budget.disk_bytes)
        self._spool = Spool(options.local)
        self.local = Store(self._spool.path / "log")
        store.sweep(directory)

        self._changed = threading.Condition()
        # Complete and not yet in the store; the first one may be on its way.
        self._waiting: deque[str] = deque()
        self._unwanted: set[str] = set()
        # The whole log: file names of all segments, here or in the store.
        self._names = {name for name in store.list(directory) if parse_segment_name(name)}
        self._wanted_there = 0  # how many of the waiting ones may be shipped now
        self._always = options.ship is Ship.ALWAYS
        self._error: Exception | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="swift_ft log shipper", daemon=True)
        self._thread.start()

    def offer(self, path: str) -> None:
        """A segment is complete on the local disk."""
        with self._changed:
            self._names.add(path.rpartition("/")[2])
            self._waiting.append(path)
            self._wanted_there += self._always
            self._changed.notify_all()

    def names(self) -> list[str]:
        """File names of all segments of the log, wherever they are, sorted."""
        with self._changed:
            return sorted(self._names)

    def find(self, name: str) -> Path:
        """Where a segment is on the local disk. Raises FileNotFoundError for names that are not the log's."""
        with self._changed:
            if name not in self._names:
                raise FileNotFoundError(name)
        return self._here(f"{self._directory}/{name}")

    def open(self, name: str) -> pa.NativeFile:
        """A segment of the log that is on the local disk. Raises FileNotFoundError for any other."""
        self.find(name)
        return self.local.open_read(f"{self._directory}/{name}")

    @property
    def waiting(self) -> int:
        """Segments that are complete and not in the store yet."""
        return len(self._waiting)

    def hurry(self) -> None:
        """Ship all that was offered, whenever it would have been its time."""
        with self._changed:
            self._wanted_there = len(self._waiting)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Waits until all that was offered is in the store.

        Raises:
            LogTimeoutError: it was not within ``timeout_s`` seconds; with the store's last error.
        """
        self.hurry()
        with self._changed:
            if self._changed.wait_for(lambda: not self._waiting, timeout_s):
                return
            count, error = len(self._waiting), self._error
        cause = f": {type(error).__name__}: {self._store.shown(error)}" if error else ", which is slow"
        raise LogTimeoutError(
            f"{count} segments of {self._directory} are not in {self._store.url} "
            f"after {timeout_s:g} s{cause}. They are kept in {self._spool.path} while this process lives.",
            path=self._directory,
        ) from error

    def drop(self, unwanted: Callable[[SegmentName], bool]) -> list[str]:
        """Forgets segments and deletes them here; returns the names of those that are not in the store."""
        dropped = []
        with self._changed:
            for file in sorted(self._names):
                path, name = f"{self._directory}/{file}", parse_segment_name(file)
                if name is None or not unwanted(name):
                    continue
                self._names.remove(file)
                if path in self._waiting:  # one that is on its way is deleted when it has arrived
                    self._unwanted.add(path)
                    dropped.append(file)
                else:
                    self._delete_here(path)
            self._wanted_there = max(self._wanted_there, len(self._unwanted))
            self._changed.notify_all()
        return dropped

    def close(self) -> None:
        """Ends the thread and removes the local tier, with all that was not shipped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=_RETRY_S)  # one that hangs in the store ends by itself, or with the process
        self._spool.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._wanted_there)
                if self._closing:
                    return
                path = self._waiting[0]
            try:
                self._ship(path)
                with self._changed:
                    self._arrived(path)
                    self._waiting.popleft()
                    self._unwanted.discard(path)
                    self._wanted_there -= 1
                    self._error = None
                    self._changed.notify_all()
            except Exception as error:  # whatever the store's client raises: it is tried again
                with self._changed:
                    self._error = error
                    self._changed.wait_for(lambda: self._closing, _RETRY_S)

    def _ship(self, path: str) -> None:
        if self._keep:  # what is kept takes no more than what is left for others
            self.disk.keep_spare(shutil.disk_usage(self._spool.path).free)
        if path not in self._unwanted:
            local = self._here(path)
            started = time.perf_counter()
            self._store.upload(local, path)
            self._choice.shipped(local.stat().st_size, time.perf_counter() - started)
        if path in self._unwanted:
            self._store.delete(path)

    def _arrived(self, path: str) -> None:
        if self._keep and path not in self._unwanted:
            self.disk.spare(path, partial(self.local.delete, path))
        else:
            self._delete_here(path)

    def _here(self, path: str) -> Path:
        return self._spool.path / "log" / path

    def _delete_here(self, path: str) -> None:
        self.local.delete(path)
        self.disk.remove(path)
