"""Two tiers: a segment is written to the local disk, and uploaded to the store in the background.

A store that is down, slow or busy costs local disk and does not delay training: segments stay there until
they are uploaded. Uploads keep the order of the log, so the store always holds a prefix of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
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
from swift_ft.logging.format.segment import SegmentName, parse_segment_name
from swift_ft.logging.options import LogOptions, Ship
from swift_ft.logging.writing.codec_policy import CodecPolicy
from swift_ft.logging.writing.disk_budget import DiskBudget
from swift_ft.observe.waits import waiting
from swift_ft.storage.store import Store

_logger = logging.getLogger(__name__)

_PREFIX = "swift-ft-spool-"
_RETRY_S = 1.0  # the store's own retries come before this wait


class LogTimeoutError(SwiftError, TimeoutError):
    """The store did not take the log in time."""


class Spool:
    """A folder on the local disk that is removed when its process ends.

    Folders of processes that were killed are removed when another one is made.

    Args:
        parent: where to make it; the system's folder for temporary files if None.

    Attributes:
        path: the folder.
        close: removes it with its content.
    """

    def __init__(self, parent: Path | None = None) -> None:
        place = spool_place(parent)
        place.mkdir(parents=True, exist_ok=True)
        sweep_spools(place)
        new = Path(tempfile.mkdtemp(prefix="swift-ft-new-", dir=place))
        # The system releases the lock however this process ends.
        self._lock = (new / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = new.rename(new.with_name(new.name.replace("swift-ft-new-", _PREFIX)))
        self.close = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())


def _remove(folder: Path, lock: TextIO, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not remove it
        shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def spool_place(parent: Path | None = None) -> Path:
    """The folder in which a :class:`Spool` is made."""
    return parent or Path(tempfile.gettempdir())


def sweep_spools(place: Path) -> None:
    """Remove the folders there of processes that were killed."""
    for folder in place.glob(f"{_PREFIX}*"):
        # Suppressed: it is another user's, is in use, or another process just removed it.
        with contextlib.suppress(OSError), (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


class SegmentUploader:
    """Uploads one log directory, of which this process is the only writer.

    A failed upload is repeated until it succeeds; :meth:`flush` reports the last error. Temporary files
    that a dead writer left in the directory are deleted.

    Args:
        store: where segments go.
        directory: the log's directory there.
        options: disk budget, when to ship, and the folder of the local tier.
        codec_policy: receives the measured throughput of the store.
        keep: uploaded segments stay on the local disk until they are dropped, or until their room is
            needed.

    Attributes:
        local: where the log is written.
        disk: the disk use of the local tier.
    """

    def __init__(
        self,
        store: Store,
        directory: str,
        options: LogOptions,
        codec_policy: CodecPolicy,
        *,
        keep: bool = False,
    ) -> None:
        self._store = store
        self._directory = directory
        self._codec_policy = codec_policy
        self._keep = keep
        self.disk = DiskBudget(options.budget.disk_bytes)
        self._spool = Spool(options.local)
        self.local = Store(self._spool.path / "log")
        store.sweep(directory)

        self._changed = threading.Condition()
        # Complete and not yet in the store; the first one may be uploading now.
        self._waiting: deque[str] = deque()
        self._dropped: set[str] = set()
        # The whole log: file names of all segments, here or in the store.
        self._names = {name for name in store.list(directory) if parse_segment_name(name)}
        self._due = 0  # how many of the waiting segments may be shipped now
        self._always = options.ship is Ship.ALWAYS
        self._error: Exception | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="swift-log-uploader", daemon=True)
        self._thread.start()

    def offer(self, path: str) -> None:
        """Queues a segment that is complete on the local disk."""
        with self._changed:
            self._names.add(path.rpartition("/")[2])
            self._waiting.append(path)
            self._due += self._always
            self._changed.notify_all()

    def names(self) -> list[str]:
        """File names of all segments of the log, wherever they are, sorted."""
        with self._changed:
            return sorted(self._names)

    def find(self, name: str) -> Path:
        """A segment's path on the local disk. Raises FileNotFoundError for names that are not the log's."""
        with self._changed:
            if name not in self._names:
                raise FileNotFoundError(name)
        return self._local_path(f"{self._directory}/{name}")

    def open(self, name: str) -> pa.NativeFile:
        """A segment of the log that is on the local disk. Raises FileNotFoundError for any other."""
        self.find(name)
        return self.local.open_read(f"{self._directory}/{name}")

    @property
    def waiting(self) -> int:
        """Segments that are complete and not in the store yet."""
        return len(self._waiting)

    def expedite(self) -> None:
        """Uploads all offered segments now, even if ``ship`` would wait."""
        with self._changed:
            self._due = len(self._waiting)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Waits until all offered segments are in the store.

        Raises:
            LogTimeoutError: that took more than ``timeout_s`` seconds; its cause is the store's last error.
        """
        self.expedite()
        with waiting(f"segments of its log to be uploaded to {self._store.url}", timeout_s), self._changed:
            if self._changed.wait_for(lambda: not self._waiting, timeout_s):
                return
            count, error = len(self._waiting), self._error
        cause = f": {type(error).__name__}: {self._store.redacted(error)}" if error else ", which is slow"
        raise LogTimeoutError(
            f"{count} segments of {self._directory} are not in {self._store.url} "
            f"after {timeout_s:g} s{cause}. They are kept in {self._spool.path} while this process lives.",
            path=self._directory,
        ) from error

    def drop(self, unwanted: Callable[[SegmentName], bool]) -> list[str]:
        """Forgets segments and deletes them locally; returns the names of those that are not in the store."""
        dropped = []
        with self._changed:
            for file in sorted(self._names):
                path, name = f"{self._directory}/{file}", parse_segment_name(file)
                if name is None or not unwanted(name):
                    continue
                self._names.remove(file)
                if path in self._waiting:  # one that is being uploaded is deleted afterwards
                    self._dropped.add(path)
                    dropped.append(file)
                else:
                    self._delete_local(path)
            self._due = max(self._due, len(self._dropped))
            self._changed.notify_all()
        return dropped

    def close(self, timeout_s: float) -> None:
        """Ends the thread and removes the local tier, with all segments that wait to be uploaded.

        An upload that is under way may end. Cut off, it would leave what nobody looks for after the run.

        Args:
            timeout_s: for that; one that hangs in the store ends with the process.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        with waiting(f"the last upload of its log to {self._store.url}", timeout_s):
            self._thread.join(max(timeout_s, _RETRY_S))
        if self._thread.is_alive():
            _logger.warning(
                "The last upload of %s to %s did not end within %g s. What it has begun may stay there: "
                "swift-recover gc deletes it.",
                self._directory,
                self._store.url,
                timeout_s,
                extra={"event": "log_upload_cut_off"},
            )
        self._spool.close()

    def _run(self) -> None:
        self._upload_until_closed()
        with contextlib.suppress(Exception):  # of uploads that failed; who waits for this has no more time
            self._store.at_once().sweep(self._directory)

    def _upload_until_closed(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._due)
                if self._closing:
                    return
                path = self._waiting[0]
            try:
                self._upload(path)
                with self._changed:
                    self._uploaded(path)
                    self._waiting.popleft()
                    self._dropped.discard(path)
                    self._due -= 1
                    self._error = None
                    self._changed.notify_all()
            except Exception as error:  # clients raise all kinds of errors; the upload is tried again
                with self._changed:
                    self._error = error
                    self._changed.wait_for(lambda: self._closing, _RETRY_S)

    def _upload(self, path: str) -> None:
        if self._keep:  # kept copies take at most as much disk as stays free
            self.disk.evict_down_to(shutil.disk_usage(self._spool.path).free)
        if path not in self._dropped:
            local = self._local_path(path)
            started = time.perf_counter()
            self._store.upload(local, path)
            self._codec_policy.record_upload(local.stat().st_size, time.perf_counter() - started)
        if path in self._dropped:
            self._store.delete(path)

    def _uploaded(self, path: str) -> None:
        if self._keep and path not in self._dropped:
            self.disk.mark_evictable(path, partial(self.local.delete, path))
        else:
            self._delete_local(path)

    def _local_path(self, path: str) -> Path:
        return self._spool.path / "log" / path

    def _delete_local(self, path: str) -> None:
        self.local.delete(path)
        self.disk.remove(path)
