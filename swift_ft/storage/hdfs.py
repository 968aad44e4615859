"""hdfs-native as torch's checkpoints expect it: open files fill buffers and know their position."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import fsspec

# If a NameNode does not answer, the client's default of 15 attempts takes three minutes. Store retries
# anyway.
_DEFAULTS = {"dfs.client.failover.max.attempts": "2"}

_BUFFER_BYTES = 1 << 20

# fsspec drops its clients in every forked process. The end of a client waits for its threads, which a forked
# process has not: no worker of a DataLoader would ever begin. So no client ends before its process.
_clients: list[Any] = []


@cache
def hdfs_class() -> type[Any] | None:
    """Registers hdfs-native for ``hdfs://`` with fsspec. None where that package is not installed."""
    try:
        from hdfs_native.fsspec import HdfsFileSystem
    except ImportError:
        return None

    class Hdfs(HdfsFileSystem):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**_DEFAULTS, **options})
            _clients.append(self)

        def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
            if mode == "rb":
                file = super()._open(path, mode)
                if len(file) != self.info(path)["size"]:
                    raise OSError(f"{path} was replaced, or is not complete yet")
                return io.BufferedReader(_Reader(file, path), _BUFFER_BYTES)
            return io.BufferedWriter(_Writer(super()._open(path, mode, *args, **options)), _BUFFER_BYTES)

    # For the whole process: checkpoints find their file system through fsspec.
    fsspec.register_implementation("hdfs", Hdfs, clobber=True)
    return Hdfs


class _Reader(io.RawIOBase):
    """A file of hdfs-native that notices when it ends too early."""

    def __init__(self, file: Any, path: str) -> None:
        self._file = file
        self._path = path
        self._size = len(file)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._size}[whence]
        self._file.seek(start + offset)
        return self.tell()

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(0, self._size - self.tell()))
        data = self._file.read(wanted) if wanted else b""
        if len(data) < wanted:
            # Where dfs.namenode.file.close.num-committed-allowed is not 0, a file may be closed before the
            # NameNode knows where its last block is. A later attempt succeeds.
            raise OSError(f"{self._path}: the last block is not there yet")
        buffer[: len(data)] = data
        return len(data)


class _Writer(io.RawIOBase):
    """A new file of hdfs-native that counts its bytes and is completed once, even if closed twice."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._size = 0
        self._failure: Exception | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self._failure is not None:
            # What is left in a buffer is flushed when the file is closed. By then torch has deleted the file,
            # and a second error, about a file that does not exist, would hide the first, which may be
            # transient.
            raise self._failure
        try:
            # The client copies anything but `bytes` byte by byte, which takes ten times as long as this copy.
            written = int(self._file.write(bytes(data)))
        except Exception as error:
            self._failure = error
            raise
        self._size += written
        return written

    def tell(self) -> int:
        return self._size

    def close(self) -> None:
        if self.closed:
            return
        try:
            if self._failure is None:  # else closing fails as well, after a minute of attempts
                self._file.close()
        finally:
            self._failure = None  # its frames refer to this
            super().close()
            io.RawIOBase.close(self._file)  # or its garbage collection would close it again
