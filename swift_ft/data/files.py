"""Samples in files of a folder, anywhere that fsspec reaches, read from copies on this machine's disk."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from swift_ft.data.file_cache import FileCache
from swift_ft.data.file_index import NEWLINE, DataFile, read_index
from swift_ft.storage.store import Store

_OPEN = 4
"""Files that are kept open."""
_TRIES = 3
"""To open a copy."""
_SCAN_BYTES = 64 << 20


class FileSamples(Dataset[Any]):
    """A map-style data set: a sample is a line of a file, or a fixed number of bytes.

    :func:`write_index` has to be called once for the folder. A file is read as a whole, from this machine's
    disk, from another machine of the job, or from the folder, in this order. :class:`GlobalBatches` takes the
    files as shards, one after the other in its order, and has those that come next fetched in the background.

    Args:
        url: of the folder: a path, or what fsspec opens, such as ``s3://bucket/tokens``.
        cache: a folder on this machine's disk, for copies. All of its workers may share it.
        decode: makes a sample of its bytes: ``json.loads``, for example. Without it, a sample is bytes.
        cache_bytes: the copies that were not used for longest are deleted beyond it. None to keep all.

    Attributes:
        copies: on this machine's disk.
        identity: changes with any byte of the files.
        shard_sizes: samples of each file.

    Raises:
        UsageError: if the folder has no index, or two files do not fit into ``cache_bytes``.
    """

    def __init__(
        self,
        url: str,
        cache: str | Path,
        *,
        decode: Callable[[bytes], Any] | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        index = read_index(Store(url))
        self._files = index.files
        self._sample_bytes = index.sample_bytes
        self._decode = decode
        self._open: OrderedDict[int, _OpenFile] = OrderedDict()
        self._starts = [0, *accumulate(file.samples for file in index.files)]
        self.copies = FileCache(url, Path(cache), cache_bytes)
        self.copies.check_room(index.files)
        self.identity = index.digest
        self.shard_sizes = [file.samples for file in index.files]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"There are samples 0 to {len(self) - 1}, and not {index}.")
        shard = bisect_right(self._starts, index) - 1
        data = self._opened(shard).sample(index - self._starts[shard])
        return data if self._decode is None else self._decode(data)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def prefetch(self, shards: Sequence[int]) -> None:
        """Fetch files in the background, in this order."""
        self.copies.prefetch(self._files[shard] for shard in shards)

    def _opened(self, shard: int) -> _OpenFile:
        if shard not in self._open:
            self._open[shard] = self._open_file(self._files[shard])
        self._open.move_to_end(shard)
        if len(self._open) > _OPEN:
            self._open.popitem(last=False)
        return self._open[shard]

    def _open_file(self, file: DataFile) -> _OpenFile:
        for _ in range(_TRIES - 1):
            with suppress(FileNotFoundError):  # another process has just made room
                return _OpenFile(self.copies.fetch(file), self._sample_bytes)
        return _OpenFile(self.copies.fetch(file), self._sample_bytes)


class _OpenFile:
    """A copy in memory, as far as it is read."""

    def __init__(self, path: Path, sample_bytes: int | None) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._sample_bytes = sample_bytes
        self._ends = None if sample_bytes is not None else _line_ends(self._map)

    def sample(self, number: int) -> bytes:
        """The bytes of a sample; a line without its end."""
        if self._ends is None:
            assert self._sample_bytes is not None
            begin = number * self._sample_bytes
            return self._map[begin : begin + self._sample_bytes]
        begin = int(self._ends[number - 1]) + 1 if number else 0
        return self._map[begin : int(self._ends[number])]


def _line_ends(content: mmap.mmap) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The offset in bytes of each line's newline, or of the end for a last line without one: int64."""
    found = []
    for start in range(0, len(content), _SCAN_BYTES):
        piece = np.frombuffer(content[start : start + _SCAN_BYTES], np.uint8)
        found.append(np.flatnonzero(piece == NEWLINE) + start)
    if content[-1] != NEWLINE:
        found.append(np.array([len(content)]))
    return np.concatenate(found)
