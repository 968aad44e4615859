"""hdfs-native as torch's checkpoints expect it, which ask an open file where it stands."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import fsspec

__all__ = ["hdfs_class"]

# A NameNode that is away: the client's own fifteen attempts take three minutes, and Store waits by itself.
_DEFAULTS = {"dfs.client.failover.max.attempts": "2"}

_BUFFER_BYTES = 1 << 20


@cache
def hdfs_class() -> type[Any] | None:
    """Makes hdfs-native what fsspec opens ``hdfs://`` with. None where that package is not installed."""
    try:
        from hdfs_native.fsspec import HdfsFileSystem
    except ImportError:
        return None

    class Hdfs(HdfsFileSystem):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**_DEFAULTS, **options})

        def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
            file = super()._open(path, mode, *args, **options)
            return file if mode == "rb" else io.BufferedWriter(_Writer(file), _BUFFER_BYTES)

    # For all who open such URLs in this process: checkpoints find their file system through fsspec.
    fsspec.register_implementation("hdfs", Hdfs, clobber=True)
    return Hdfs


class _Writer(io.RawIOBase):
    """A new file of hdfs-native that counts, and that is completed once however often it is closed."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        written = int(self._file.write(data))
        self._size += written
        return written

    def tell(self) -> int:
        return self._size

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._file.close()
        finally:
            super().close()
            io.RawIOBase.close(self._file)  # or its own collection would ask again
