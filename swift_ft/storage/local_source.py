"""A file of this machine: what describes its content is looked at in place, the content is read into buffers.

Through a map, each 4 KiB are a page fault, and count as memory of this process until the map ends. A read
moves many pages at once, and none of them counts. If the disk fails, a read raises, while a page that cannot
be loaded ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

_PIECE_BYTES = 1 << 20  # stays in a core's cache until its digest is computed


class LocalSource(pa.BufferReader):  # type: ignore[misc]  # Arrow has no types
    """An open file, mapped. What was opened stays readable when its name is gone.

    Raises:
        OSError: it cannot be opened or mapped.
    """

    def __new__(cls, path: str) -> LocalSource:
        """Open and map a file."""
        file = os.open(path, os.O_RDONLY)
        try:
            empty = os.fstat(file).st_size == 0  # and cannot be mapped
            mapped = b"" if empty else mmap.mmap(file, 0, access=mmap.ACCESS_READ)
            self: LocalSource = super().__new__(cls, pa.py_buffer(mapped))
        except BaseException:
            os.close(file)
            raise
        self._file, self._mapped = file, mapped
        weakref.finalize(self, os.close, file)
        return self

    def __init__(self, path: str) -> None:
        """Everything is done in :meth:`__new__`, as in Arrow's own class."""

    def read_ahead(self) -> None:
        """Have the system read the file from its disk, if it has not yet. Other threads run meanwhile."""
        if sys.platform != "linux":
            return
        # Nothing is copied. Advice to read ahead (POSIX_FADV_WILLNEED) takes three times as long, since the
        # system then reads page by page what it otherwise reads in large pieces.
        with Path(os.devnull).open("wb", buffering=0) as nowhere:
            at = 0
            with _unless_unsupported():
                while read := os.sendfile(nowhere.fileno(), self._file, at, self.size() - at):
                    at += read

    def read_into(self, part: memoryview, buffer: memoryview) -> Iterator[memoryview]:
        """Fill a buffer with a part of the file, and yield each piece of it when it is filled.

        Args:
            part: a view of this source.
            buffer: as many bytes, writable.

        Raises:
            OSError: the disk does not give them, or the file is shorter than it was.
        """
        begin = _address(part) - _address(memoryview(self._mapped)) if part else 0
        for at in range(0, buffer.nbytes, _PIECE_BYTES):
            piece = buffer[at : at + _PIECE_BYTES]
            filled = 0
            while filled < piece.nbytes:
                read = os.preadv(self._file, [piece[filled:]], begin + at + filled)
                if not read:
                    raise OSError(errno.EIO, f"it ends after {begin + at + filled} bytes")
                filled += read
            yield piece

    def forget_pages(self) -> None:
        """Give back the memory of what was looked at. A later look reads it again."""
        if isinstance(self._mapped, mmap.mmap) and hasattr(self._mapped, "madvise"):  # not on every system
            self._mapped.madvise(mmap.MADV_DONTNEED)


@contextlib.contextmanager
def _unless_unsupported() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def _address(view: memoryview) -> int:
    return int(pa.py_buffer(view).address)
