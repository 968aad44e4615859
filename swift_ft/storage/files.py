"""Files of a store on a filesystem that needs no network: opened, written and renamed.

A store whose rename differs gets its own subclass of :class:`Files`, here or in ``remote.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from fsspec.spec import AbstractFileSystem

from swift_ft.storage.local_source import LocalSource

_MADV_POPULATE_READ = 22  # of Linux 5.14 and newer; Python has no name for it yet


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file's entry in a listing.

    Attributes:
        size: in bytes.
        modified: when it was written, in Unix seconds by the store's clock; None if the store does not say.
    """

    size: int
    modified: float | None


class Files:
    """Any fsspec filesystem. All paths are absolute, as that filesystem writes them.

    Attributes:
        fs: the filesystem.
        needs_download: a file is downloaded to this machine before it is read.
    """

    needs_download = False

    def __init__(self, fs: Any) -> None:
        self.fs = fs

    def renew(self) -> bool:
        """After a call that was refused: whether it may succeed now, with other credentials than before."""
        return False

    def make_root(self, path: str, *, create: bool) -> None:
        """See to it that what a store is in exists.

        Args:
            path: the store's.
            create: make what is not made without being asked.
        """

    def make_parent(self, path: str) -> None:
        """Makes the directory that a file is in."""
        self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def open_sink(self, path: str) -> pa.NativeFile:
        """Opens a new file for writing."""
        return pa.PythonFile(self.fs.open(path, "wb"), mode="w")

    def reserve(self, path: str, size: int) -> bool:
        """Reserves room for an open file; False if the filesystem cannot do that."""
        return False

    def trim(self, path: str, size: int) -> None:
        """Releases room that was reserved beyond a file's size."""

    def open_source(self, path: str) -> pa.NativeFile:
        """Opens a whole file for reading."""
        return pa.BufferReader(self.fs.cat_file(path))

    def rename(self, source: str, destination: str) -> None:
        """Replaces the destination."""
        self.fs.mv(source, destination)

    def upload(self, local: Path, temporary: str, path: str) -> None:
        """Copies a file of this machine. Under its final name it is complete or absent."""
        self.fs.put_file(str(local), temporary)
        self.rename(temporary, path)

    def put(self, temporary: str, path: str, data: bytes) -> None:
        """Writes or replaces a small file atomically: a reader sees the old content or the new."""
        self.fs.pipe_file(temporary, data)
        self.rename(temporary, path)

    def exists(self, path: str) -> bool:
        """True if there is a file or a directory of that name.

        Raises:
            Exception: the look failed. What is there counts as absent only if the filesystem says so.
        """
        # Not by `fs.exists()`: fsspec's own takes each error for absence.
        try:
            self.fs.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def list(self, directory: str) -> list[str]:
        """Names in a directory. Raises FileNotFoundError if it is absent."""
        return [path.rstrip("/").rpartition("/")[2] for path in self.fs.ls(directory, detail=False)]

    def find(self, directory: str) -> dict[str, FileFacts]:
        """All files below a directory, by their path in it. May raise FileNotFoundError if it is absent."""
        below = directory.strip("/") + "/"
        plain = type(self.fs).find is AbstractFileSystem.find
        found = dict(self._below(directory)) if plain else self.fs.find(directory, detail=True)
        return {
            name.strip("/").removeprefix(below): FileFacts(int(info["size"] or 0), _modified(info))
            for name, info in sorted(found.items())
        }

    def _below(self, directory: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """As fsspec's own ``find()``, which leaves out what it cannot list."""
        for info in self.fs.ls(directory, detail=True):
            if info["type"] != "directory":
                yield info["name"], info
                continue
            with contextlib.suppress(*_not_of_the_store(info["name"])):
                yield from self._below(info["name"])

    def abandoned_uploads(self, directory: str) -> dict[str, int]:
        """Bytes of unlisted leftovers of dead writers, by path below a directory."""
        return {}

    def abort_abandoned_uploads(self, directory: str) -> int:
        """Removes unlisted leftovers of dead writers; returns how many."""
        return 0


class LocalFiles(Files):
    """Files of this operating system.

    Small files are markers that other processes act upon, so they are synchronised to the disk. Segments are
    not: a missing footer reveals one that a power failure truncated.
    """

    def open_sink(self, path: str) -> pa.NativeFile:
        """Opens a new file, written outside of the GIL."""
        return pa.OSFile(path, "wb")

    def reserve(self, path: str, size: int) -> bool:
        """Allocates blocks, so that a full disk is found before a record is written."""
        if not hasattr(os, "posix_fallocate"):  # not on every system
            return False
        with Path(path).open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        return True

    def trim(self, path: str, size: int) -> None:
        """Cuts a file to its size."""
        os.truncate(path, size)

    def open_source(self, path: str) -> pa.NativeFile:
        """Maps a file into memory, once it has been read from its disk."""
        source = LocalSource(path)
        source.read_ahead()
        return source

    def pieces(self, file: io.FileIO, piece_bytes: int) -> Iterator[memoryview]:
        """The bytes of an open file: mapped if possible, because a copy costs more than a digest of it."""
        begin, buffer, size = 0, bytearray(), os.fstat(file.fileno()).st_size
        while True:
            part = map_part(file.fileno(), begin, min(piece_bytes, size - begin)) if begin < size else None
            if part is None:
                buffer = buffer or bytearray(piece_bytes)
                file.seek(begin)
                part = memoryview(buffer)[: file.readinto(buffer)]
            if not part:
                return
            begin += len(part)
            yield part

    def rename(self, source: str, destination: str) -> None:
        """Replaces the destination in one step."""
        Path(source).replace(destination)

    def upload(self, local: Path, temporary: str, path: str) -> None:
        """Copies a file, which then appears in one step."""
        shutil.copyfile(local, temporary)
        self.rename(temporary, path)

    def put(self, temporary: str, path: str, data: bytes) -> None:
        """Writes or replaces a small file, durably."""
        _write_durably(temporary, data)
        Path(temporary).replace(path)
        _sync_directory(path)


def _not_of_the_store(folder: str) -> tuple[type[OSError], ...]:
    """The errors by which a folder that was listed is none of the store's: it was deleted meanwhile, or it is
    the one that each Linux disk has for its own repairs, and that only root may read.
    """
    own = folder.rstrip("/").endswith("/lost+found")
    return (FileNotFoundError, PermissionError) if own else (FileNotFoundError,)


def _modified(info: dict[str, Any]) -> float | None:
    """Each filesystem of fsspec has a name of its own for it."""
    if "modification_time" in info:  # of HDFS, in milliseconds
        return float(info["modification_time"]) / 1000
    found = info.get("mtime", info.get("LastModified", info.get("created")))
    return found.timestamp() if isinstance(found, datetime) else found


def _write_durably(path: str, data: bytes) -> None:
    with Path(path).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: str) -> None:
    descriptor = os.open(Path(path).parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Parts of local files, mapped into memory: for those who look at each byte once, and need no copy of it.
#
# The disk may fail under a map, and a file on a network share may be cut short. Touching such a page ends a
# process with SIGBUS. So the system is asked to read all pages first, and a part that it cannot read is not
# mapped: an ordinary read then says what is wrong.


def map_part(file: int, begin: int, size: int) -> memoryview | None:
    """Map a part of a file, all of which has been read.

    Args:
        file: descriptor of a local file.
        begin: the first byte.
        size: in bytes, at least 1.

    Returns:
        The part; None if it cannot be mapped, or not all of it can be read. The map ends with the last view.
    """
    if begin % mmap.ALLOCATIONGRANULARITY:
        return None
    try:
        mapped = mmap.mmap(file, size, offset=begin, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # a file that is shorter, or that cannot be mapped
        return None
    return memoryview(mapped) if _is_read(mapped) else None


def _is_read(mapped: mmap.mmap) -> bool:
    """Have the system read all pages. Other threads run while it waits for the disk."""
    madvise = _madvise()
    if madvise is None:
        return False
    pages = np.frombuffer(mapped, np.uint8)
    return madvise(pages.ctypes.data, pages.nbytes, _MADV_POPULATE_READ) == 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    found: Callable[[int, int, int], int] = function
    return found
