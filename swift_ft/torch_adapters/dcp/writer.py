"""Writes one worker's part of a checkpoint as torch's DCP does, without a group.

DCP alone would store the URL, credentials included.

Private parts used (tested on torch 2.11 to 2.14):

- ``FileSystemWriter`` with its ``fs.create_stream``, ``fs.concat_path``, ``fs.rename`` and ``path``. All that
  it writes goes through ``fs``.
- ``FileSystemWriter._write_data``, which writes lists of items, one file each, and the attribute ``mappings``
  of the planner: the path of each item in the state.
"""

from __future__ import annotations

import os
import posixpath
import queue
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from swift_ft.storage.digest import Digester, FileDigest
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.errors import cause_of
from swift_ft.torch_adapters.dcp.store_files import StoreFiles

_DRAFT = ".tmp"


def staged(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state on the host, which later steps do not change."""
    copy: dict[str, Any] = BlockingAsyncStager().stage(state)
    return copy


FileOf = Callable[[tuple[str, ...]], int]
"""By the path of a value in a state, the number of the file that it is written to."""

Copies = Callable[[str], AbstractContextManager[Callable[[Any], object]]]
"""By the path of a file in the store, a second place for its bytes: the function writes the next ones."""


def write_part(
    store: Store,
    path: str,
    state: dict[str, Any],
    *,
    file_of: FileOf | None = None,
    copies: Copies | None = None,
) -> dict[str, FileDigest]:
    """Write a part, over what an earlier attempt left.

    Args:
        store: where.
        path: the part's place there.
        state: on the host.
        file_of: which file a value goes to. By default all go to one.
        copies: where each file is written a second time. By default nowhere.

    Returns:
        By name, the digest of each file, as it was handed to the store.

    Raises:
        Exception: what the store's client raised.
    """
    writer = _Writer(store, path, file_of, copies)
    try:
        state_dict_saver.save(state, storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        failed = cause_of(error)
    else:
        return writer.digests
    raise failed


class _Writer(FileSystemWriter):
    def __init__(self, store: Store, path: str, file_of: FileOf | None, copies: Copies | None) -> None:
        # No copying ahead: the state is on the host. A remote file is durable when it is closed and has no
        # descriptor to sync; torch would sync all disks of this machine instead.
        url = store.child_url(path)
        super().__init__(url, per_thread_copy_ahead=0, sync_files=not store.remote)
        self._files = _DigestedFiles(store, path, copies)
        self._file_of = file_of
        self.path = url
        self.fs = self._files  # type: ignore[assignment]  # torch declares its class for local files
        self._shown = f"{store.url}/{path}"

    @property
    def checkpoint_id(self) -> str:
        return self._shown

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if self._file_of is None:
            return super().write_data(plan, planner)
        assert isinstance(planner, DefaultSavePlanner)
        by_file: dict[int, list[WriteItem]] = {}
        for item in plan.items:
            path = planner.mappings[item.index.fqn]
            by_file.setdefault(self._file_of(tuple(map(str, path))), []).append(item)
        files: queue.Queue[Any] = queue.Queue()
        for number, items in sorted(by_file.items()):
            name = f"{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}"
            files.put((self.fs.concat_path(self.path, name), name, items))
        return self._write_data(planner, files)

    @property
    def digests(self) -> dict[str, FileDigest]:
        """By name, of each file that was written."""
        return self._files.digests


def _nowhere(_: str) -> AbstractContextManager[Callable[[Any], object]]:
    return nullcontext(lambda _: None)


class _DigestedFiles(StoreFiles):
    """Computes the digest of each file while DCP writes it, and writes its copy.

    Args:
        store: where.
        part: the part's place there.
        copies: where the copies go.
    """

    def __init__(self, store: Store, part: str, copies: Copies | None) -> None:
        super().__init__(store)
        self._part = part
        self._copies = copies
        self.digests: dict[str, FileDigest] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        name = posixpath.basename(path).removesuffix(_DRAFT)  # DCP renames it at the end
        copied = (self._copies or _nowhere)(f"{self._part}/{name}")
        with super().create_stream(path, mode) as stream, copied as copy:
            digested = _DigestedStream(stream, copy)
            yield digested
        self.digests[posixpath.basename(path)] = digested.digester.digest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[posixpath.basename(new_path)] = self.digests.pop(posixpath.basename(path))


class _DigestedStream:
    """A file that is being written. DCP only appends to it."""

    def __init__(self, stream: Any, copy: Callable[[Any], object]) -> None:
        self._stream = stream
        self._copy = copy
        self.digester = Digester()

    def write(self, data: Any) -> Any:
        self.digester.update(data)
        self._copy(data)
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
