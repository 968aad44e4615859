"""How a store's files are opened, put and renamed where this process reaches them without a network.

The seam for further stores is :class:`Files`: one whose rename or exclusive create differs gets a class of
its own, here or in ``remote.py``.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa

__all__ = ["Files", "LocalFiles"]

_READ_AHEAD_BYTES = 64 << 20  # of each file
# What filesystems without hard links (FUSE mounts of object stores, some network shares) answer.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class Files:
    """Any fsspec filesystem. All paths are absolute, as that filesystem writes them.

    Attributes:
        fs: the filesystem.
        fetched: a file is brought to this machine before it is read, and that takes a while.
    """

    fetched = False

    def __init__(self, fs: Any) -> None:
        self.fs = fs

    def make_parent(self, path: str) -> None:
        """Makes the directory that a file is in."""
        self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def open_sink(self, path: str) -> pa.NativeFile:
        """Opens a new file for writing."""
        return pa.PythonFile(self.fs.open(path, "wb"), mode="w")

    def reserve(self, path: str, size: int) -> bool:
        """Takes room for an open file, where that can be done; False if it cannot."""
        return False

    def trim(self, path: str, size: int) -> None:
        """Gives back what was reserved beyond a file's size."""

    def open_source(self, path: str) -> pa.NativeFile:
        """Opens a file for reading, whole."""
        return pa.BufferReader(self.fs.cat_file(path))

    def rename(self, source: str, destination: str) -> None:
        """Replaces the destination."""
        self.fs.mv(source, destination)

    def upload(self, local: Path, temporary: str, path: str) -> None:
        """Copies a file of this machine: under its name it is complete, or absent."""
        self.fs.put_file(str(local), temporary)
        self.rename(temporary, path)

    def put(self, temporary: str, path: str, data: bytes) -> None:
        """Writes or replaces a small file: a reader sees the old content or the new, nothing between."""
        self.fs.pipe_file(temporary, data)
        self.rename(temporary, path)

    def stage(self, temporary: str, data: bytes) -> None:
        """What comes before :meth:`create`, where that moves a file into place."""

    def create(self, temporary: str, path: str, data: bytes) -> None:
        """Writes a small file that must not exist yet, or raises FileExistsError.

        Called again after a failure it takes the same temporary name, by which it knows its own earlier work.
        """
        self.fs.pipe_file(path, data, mode="create")

    def exists(self, path: str) -> bool:
        """True if there is a file or a directory of that name."""
        return bool(self.fs.exists(path))

    def list(self, directory: str) -> list[str]:
        """Names in a directory. Raises FileNotFoundError if it is absent."""
        return [path.rstrip("/").rpartition("/")[2] for path in self.fs.ls(directory, detail=False)]

    def abandoned(self, directory: str) -> int:
        """Removes what dead writers left that no listing shows; returns how much it was."""
        return 0


class LocalFiles(Files):
    """Files of this operating system.

    Small files are markers that others act upon, so they are synchronised to the disk. Segments are not: one
    that a power cut tore is detected by its missing footer.
    """

    def open_sink(self, path: str) -> pa.NativeFile:
        """Opens a new file, written outside of the GIL."""
        return pa.OSFile(path, "wb")

    def reserve(self, path: str, size: int) -> bool:
        """Takes blocks of the disk, so that the writer itself does not meet a full one."""
        if not hasattr(os, "posix_fallocate"):  # not on every system
            return False
        with Path(path).open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        return True

    def trim(self, path: str, size: int) -> None:
        """Cuts a file to its size."""
        os.truncate(path, size)

    def open_source(self, path: str) -> pa.NativeFile:
        """Maps a file into memory."""
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:  # mapping an empty file is an error on some systems
                return pa.BufferReader(b"")
            if hasattr(os, "posix_fadvise"):
                # The system begins to read it, and who asks for a message later does not wait for the disk.
                os.posix_fadvise(file.fileno(), 0, min(size, _READ_AHEAD_BYTES), os.POSIX_FADV_WILLNEED)
            return pa.memory_map(path, "r")

    def rename(self, source: str, destination: str) -> None:
        """Replaces the destination in one step."""
        Path(source).replace(destination)

    def upload(self, local: Path, temporary: str, path: str) -> None:
        """Copies a file, which then appears in one step."""
        shutil.copyfile(local, temporary)
        self.rename(temporary, path)

    def put(self, temporary: str, path: str, data: bytes) -> None:
        """Writes or replaces a small file, durably."""
        _write_durably(temporary, "wb", data)
        Path(temporary).replace(path)
        _sync_directory(path)

    def create(self, temporary: str, path: str, data: bytes) -> None:
        """Writes a small file that must not exist yet, durably, or raises FileExistsError."""
        _write_durably(temporary, "wb", data)
        try:
            # A link appears with its content complete; an exclusive open would show an empty file first.
            Path(path).hardlink_to(temporary)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _write_durably(path, "xb", data)
        finally:
            Path(temporary).unlink()
        _sync_directory(path)


def _write_durably(path: str, mode: str, data: bytes) -> None:
    with Path(path).open(mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: str) -> None:
    descriptor = os.open(Path(path).parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
