"""hdfs-native as fsspec's users expect it: a file that was closed may be closed again."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import fsspec

__all__ = ["hdfs_class"]

# A NameNode that is away: the client's own fifteen attempts take three minutes, and Store waits by itself.
_DEFAULTS = {"dfs.client.failover.max.attempts": "2"}


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

        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            file = super()._open(path, mode, **options)
            return file if mode == "rb" else _Writer(file)

    # Torch's checkpoints open their files through fsspec, too, and close them twice.
    fsspec.register_implementation("hdfs", Hdfs, clobber=True)
    return Hdfs


class _Writer(io.RawIOBase):
    """An open file of hdfs-native; only its first ``close()`` asks the NameNode to complete it."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return int(self._file.write(data))

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._file.close()
        finally:
            super().close()
            io.RawIOBase.close(self._file)  # or its own collection would ask again
