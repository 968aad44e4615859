"""A file that appears under its name when it is complete, or never."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from swift_ft.storage.files import Files

_WRITE_BUFFER_BYTES = 1 << 16
_RESERVED_BYTES = 8 << 20

T = TypeVar("T")


class Attempt(Protocol):
    """Calls an action, in the way of a store."""

    def __call__(self, action: Callable[[], T]) -> T:
        """The value that the action returned."""


class AtomicFile:
    """A file that does not exist until :meth:`commit`. As a context manager it commits, or aborts on an
    exception. :meth:`swift_ft.storage.store.Store.open_write` makes them.

    Args:
        files: the filesystem.
        temporary: where it is until then, as the filesystem writes it.
        path: its name in the store.
        absolute: how the filesystem writes a path in the store.
        retry: waits for a store that cannot be used.
        present: tells a file that is absent from a store that is gone.
        remove: deletes the temporary file.

    Attributes:
        sink: the open file as pyarrow knows it, for writers that want to avoid Python per write.
    """

    def __init__(
        self,
        files: Files,
        temporary: str,
        path: str,
        *,
        absolute: Callable[[str], str],
        retry: Attempt,
        present: Attempt,
        remove: Callable[[], None],
    ) -> None:
        self._files = files
        self._temporary = temporary
        self._path = path
        self._absolute = absolute
        self._retry = retry
        self._present = present
        self._remove = remove
        self._size = self._reserved = 0
        self._failure: Exception | None = None  # of an attempt to close it: its end is lost
        raw = retry(lambda: files.open_sink(temporary))
        self.sink: pa.NativeFile = pa.BufferedOutputStream(raw, _WRITE_BUFFER_BYTES)

    @property
    def closed(self) -> bool:
        """True after commit and abort."""
        return bool(self.sink.closed)

    def writable(self) -> bool:
        """True until commit or abort."""
        return not self.closed

    def write(self, data: Any) -> int:
        """Appends bytes; returns how many."""
        self.sink.write(data)
        return memoryview(data).nbytes

    def tell(self) -> int:
        """Bytes written so far."""
        return int(self.sink.tell()) if not self.closed else self._size

    def reserve(self, size: int, *, written: int | None = None) -> None:
        """Reserves room on the disk for further bytes, where the store supports it.

        Args:
            size: how many.
            written: what :meth:`tell` would say, if the caller knows.

        Raises:
            OSError: there is no room.
        """
        needed = (self.tell() if written is None else written) + size
        if needed <= self._reserved:
            return
        # In large steps; on a nearly full disk only as much as is needed.
        step = max(needed, self._reserved + _RESERVED_BYTES)
        try:
            took = self._files.reserve(self._temporary, step)
        except OSError:
            step = needed
            took = self._present(lambda: self._files.reserve(self._temporary, needed))
        self._reserved = step if took else 0

    def flush(self) -> None:
        """Writes buffered bytes to the filesystem."""
        self.sink.flush()

    def commit(self, path: str | None = None) -> str:
        """Closes the file and gives it its name, atomically.

        Args:
            path: the name, where it was not yet known at opening; must be in the same directory.

        Returns:
            The path of the committed file.
        """
        if self._failure is not None:
            raise self._failure
        self._size = self.tell()  # of an earlier attempt, if it is closed
        try:
            self.sink.close()
        except Exception as error:
            self._failure = error
            raise
        path = path or self._path
        destination = self._absolute(path)

        def place() -> None:
            if self._reserved > self._size:
                self._files.trim(self._temporary, self._size)
            self._files.rename(self._temporary, destination)

        self._retry(place)
        return path

    def abort(self) -> None:
        """Closes and removes the unfinished file. Does nothing after a commit."""
        try:
            if not self.closed:
                self.sink.close()
        finally:
            self._remove()

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif not self.closed:
            self.commit()
