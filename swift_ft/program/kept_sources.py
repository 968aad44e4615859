"""The sources of a program as they were when it was started, for all that is forked from its launcher.

An editor saves a module while the run goes on, or a branch is checked out. Workers that are started later
must run what the others run. So each source is read once: by the launcher, or by the worker that is the first
to import it.
They are in a file without a name, which all of these processes have open, and which ends with them:

    length ─▶ (edition, path, module, source, stat, code) ─▶ length ─▶ ... ─▶ 0

A record is there once its length is, which is written last. So a process that dies meanwhile leaves nothing.
Where the disk is full, each process has what it has read itself, and what it had when it was forked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import marshal
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import IO

_logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")
_SHOWN = 12
"""Digits of a digest: enough to tell two files apart."""

Stat = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class KeptSource:
    """A file as it was when it was read.

    Attributes:
        path: absolute.
        module: the name under which it is imported; ``__main__`` for the script itself.
        source: its bytes.
        stat: of the file then: what an edit changes.
        code: what it was compiled to.
    """

    path: str
    module: str
    source: bytes
    stat: Stat
    code: CodeType

    @property
    def digest(self) -> str:
        """The beginning of its SHA-256."""
        return digest_of(self.source)

    def has_changed(self) -> bool:
        """Whether the file is another one by now, or gone. One that was only touched has not changed."""
        try:
            if stat_of(self.path) == self.stat:
                return False
            with open(self.path, "rb") as file:  # noqa: PTH123  (asked often)
                return file.read() != self.source
        except OSError:
            return True


class KeptSources:
    """The kept sources. All processes that are forked from its maker share it; any thread may use it."""

    def __init__(self) -> None:
        self._file = _nameless_file()
        self._is_full = False
        self._edition = self._read_to = 0
        self._by_path: dict[str, KeptSource] = {}
        self._tails: set[str] = set()
        self._mutex = threading.RLock()
        # A thread may hold it while another one forks a process of a data loader.
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._mutex = threading.RLock()

    def begin_edition(self, number: int) -> None:
        """Have what this process reads kept apart from what others have read with another number.

        For processes that are to run the files as they are now, though others run earlier ones.
        """
        with self._mutex:
            self._edition, self._read_to = number, 0
            self._by_path, self._tails = {}, set()

    def get(self, path: str) -> KeptSource | None:
        """The source with an absolute path, if it is kept."""
        with self._mutex:
            self._refresh()
            return self._by_path.get(path)

    def has_module(self, tail: str) -> bool:
        """Whether a module is kept whose name ends so."""
        with self._mutex:
            self._refresh()
            return tail in self._tails

    def all(self) -> list[KeptSource]:
        """All that is kept so far."""
        with self._mutex:
            self._refresh()
            return list(self._by_path.values())

    def keep(self, path: str, module: str, make: Callable[[bytes], CodeType]) -> KeptSource:
        """The source with an absolute path, which is read, compiled and kept if it is not yet.

        Where it cannot be kept for other processes, this one has it.

        Raises:
            OSError: it cannot be read.
            SyntaxError, ValueError: it cannot be compiled.
        """
        if (known := self.get(path)) is not None:
            return known
        stat = stat_of(path)
        with open(path, "rb") as file:  # noqa: PTH123  (as importlib does)
            source = file.read()
        code = make(source)
        with self._mutex:
            try:
                with self._locked():
                    self._refresh()
                    if (known := self._by_path.get(path)) is not None:  # another worker was faster
                        return known
                    self._append(marshal.dumps((self._edition, path, module, source, stat, code)))
                    self._refresh()
            except OSError as error:
                self._warn(path, error)
                self._add(KeptSource(path, module, source, stat, code))
            return self._by_path[path]

    def _warn(self, path: str, error: OSError) -> None:
        if not self._is_full:
            self._is_full = True
            _logger.warning(
                "%s and later sources of the program cannot be kept (%s): a worker that is started after an "
                "edit of them runs what they are then. Make room for temporary files.",
                path,
                error.strerror,
                extra={"event": "sources_not_kept"},
            )

    def _add(self, kept: KeptSource) -> None:
        self._by_path[kept.path] = kept
        self._tails.add(kept.module.rpartition(".")[2])

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _append(self, record: bytes) -> None:
        place, done = self._read_to + _LENGTH.size, 0
        while done < len(record):
            done += os.pwrite(self._file.fileno(), record[done:], place + done)
        os.pwrite(self._file.fileno(), _LENGTH.pack(len(record)), self._read_to)

    def _refresh(self) -> None:
        """Read what other processes have added."""
        number = self._file.fileno()
        while len(head := os.pread(number, _LENGTH.size, self._read_to)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            if not length:  # whoever began to write there died
                return
            edition, *found = marshal.loads(os.pread(number, length, self._read_to + _LENGTH.size))
            self._read_to += _LENGTH.size + length
            if edition == self._edition:
                self._add(KeptSource(*found))


def _nameless_file() -> IO[bytes]:
    """It is open as long as the process lives: on a disk, or in memory if no disk has room for it."""
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return os.fdopen(os.memfd_create("swift-sources"), "w+b")


def digest_of(content: bytes) -> str:
    """The beginning of a SHA-256."""
    return hashlib.sha256(content).hexdigest()[:_SHOWN]


def stat_of(path: str) -> Stat:
    """The values that an edit of a file changes: its time in ns, its bytes, and its inode.

    Raises:
        OSError: it is gone.
    """
    found = os.stat(path)  # noqa: PTH116  (asked often)
    return found.st_mtime_ns, found.st_size, found.st_ino


_kept: KeptSources | None = None


def start_keeping() -> KeptSources:
    """Keep the sources of what runs from now on in this process, and in those that are forked from it."""
    global _kept
    _kept = KeptSources()
    return _kept


def kept_sources() -> KeptSources | None:
    """The sources that are kept for this process; None where none are."""
    return _kept
