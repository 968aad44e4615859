"""How a store's files are opened, put and renamed: through fsspec, or directly where they are local.

This is the seam for further stores: one whose rename or exclusive create differs gets a class here.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pyarrow as pa

__all__ = ["LocalFiles", "RemoteFiles"]

# What filesystems without hard links (FUSE mounts of object stores, some network shares) answer.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class RemoteFiles:
    """Any fsspec filesystem. All paths are absolute, as that filesystem writes them."""

    def __init__(self, fs: Any) -> None:
        self.fs = fs

    def open_sink(self, path: str) -> pa.NativeFile:
        """Opens a new file for writing."""
        return pa.PythonFile(self.fs.open(path, "wb"), mode="w")

    def open_source(self, path: str) -> pa.NativeFile:
        """Opens a file for reading. It is fetched whole: one request beats many small ones."""
        return pa.BufferReader(self.fs.cat_file(path))

    def rename(self, source: str, destination: str) -> None:
        """Replaces the destination."""
        self.fs.mv(source, destination)

    def put(self, temporary: str, path: str, data: bytes) -> None:
        """Writes or replaces a small file: a reader sees the old content or the new, nothing between."""
        self.fs.pipe_file(temporary, data)
        self.rename(temporary, path)

    def create(self, temporary: str, path: str, data: bytes) -> None:
        """Writes a small file that must not exist yet, or raises FileExistsError."""
        self.fs.pipe_file(path, data, mode="create")


class LocalFiles(RemoteFiles):
    """Files of this operating system.

    Small files are markers that others act upon, so they are synchronised to the disk. Segments are not: one
    that a power cut tore is detected by its missing footer.
    """

    def open_sink(self, path: str) -> pa.NativeFile:
        """Opens a new file, written outside of the GIL."""
        return pa.OSFile(path, "wb")

    def open_source(self, path: str) -> pa.NativeFile:
        """Maps a file into memory."""
        # Mapping an empty file is an error on some systems.
        return pa.memory_map(path, "r") if Path(path).stat().st_size else pa.BufferReader(b"")

    def rename(self, source: str, destination: str) -> None:
        """Replaces the destination in one step."""
        Path(source).replace(destination)

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
