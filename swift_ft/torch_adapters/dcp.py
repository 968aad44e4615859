"""One worker's part of a checkpoint, as torch's DCP writes and reads it, without a group.

DCP alone is not enough. Its errors wrap the cause in an exception that is no ``Exception``. Its reader
executes what a file names, and takes every byte for the one that was written. Its writer stores the URL,
credentials included.

Private parts used (tested on torch 2.13):

- ``torch.distributed.checkpoint._fsspec_filesystem``: DCP's reader and writer through fsspec, with their
  ``fs.create_stream``, ``fs.concat_path``, ``fs.rename``, ``path`` and the file name ``.metadata``. All that
  they read and write goes through ``fs``.
- ``FileSystemReader._slice_file`` with ``storage_data``: where an item lies in its file; and
  ``torch.distributed._shard._utils.narrow_tensor_by_index``: a range of a tensor.
- ``FileSystemWriter._write_data``, which writes lists of items, one file each, and the attribute ``mappings``
  of the planner: the path of each item in the state.
- ``torch.distributed.checkpoint._traverse.set_element``: puts a loaded value into a nested state.
- The classes that a pickled ``.metadata`` names (``_KNOWN``).
"""

from __future__ import annotations

import io
import os
import pickle
import queue
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import IO, Any, Protocol

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from swift_ft.errors import DamagedCheckpointError
from swift_ft.storage.digest import Digester, FileDigest, digest_of_file
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.saved_tensors import read_into

__all__ = ["FileOf", "NearFiles", "PartReader", "check_digest", "staged", "write_part"]

# DCP warns in threads, which no context manager reaches. Here it works without a group on purpose, and the
# next attempt overwrites what a failed one left.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
warnings.filterwarnings("ignore", message="Detected an existing checkpoint in")

torch.serialization.add_safe_globals([io.BytesIO])  # DCP stores a state's bytes as one

_METADATA = ".metadata"
_DRAFT = ".tmp"
_SMALL_BYTES = 1 << 20
# The classes in DCP's metadata of a checkpoint, besides dtypes.
_DCP = "torch.distributed.checkpoint"
_KNOWN = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


def staged(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state on the host, which later steps do not change."""
    copy: dict[str, Any] = BlockingAsyncStager().stage(state)
    return copy


class NearFiles(Protocol):
    """Copies of files that are nearer than the store."""

    def nearer(self, path: str, expected: FileDigest | None) -> IO[bytes] | None:
        """A copy of a file of the store, at its beginning; None if there is none that is whole."""

    def from_store(self, size: int) -> None:
        """Called with the size of each file that is read from the store after all."""


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
        failed = _cause_of(error)
    else:
        return writer.digests
    raise failed


class PartReader(FsspecReader):
    """Reads a part, and executes nothing that its files contain.

    Args:
        store: where.
        path: the part's place there.
        digests: by name, what each file has to be; None if unknown. A file that differs is not
            read: :class:`DamagedCheckpointError`.
        near: copies that are asked for first, if there are digests.
    """

    def __init__(
        self,
        store: Store,
        path: str,
        digests: Mapping[str, FileDigest] | None = None,
        near: NearFiles | None = None,
    ) -> None:
        super().__init__(store.child_url(path))
        if digests is not None:
            verified = _VerifiedFiles(path, digests, near, in_memory=store.remote)
            self.path = verified.init_path(store.child_url(path))
            self.fs = verified  # type: ignore[assignment]  # torch declares its class for local files
        self._shown = f"{store.url}/{path}"
        self._metadata: Metadata | None = None

    @property
    def checkpoint_id(self) -> str:
        """How torch names the checkpoint in its logs: without credentials."""
        return self._shown

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensors and bytes of the part. See :class:`torch.distributed.checkpoint.StorageReader`."""
        if self._metadata is None:
            with self.fs.create_stream(self.fs.concat_path(self.path, _METADATA), "rb") as file:
                metadata = _Unpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"{_METADATA} holds {type(metadata).__name__}")
            self._metadata = metadata
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan names, file by file. See :class:`torch.distributed.checkpoint.StorageReader`."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as file:
                for item in sorted(items, key=lambda item: self.storage_data[item.storage_index].offset):
                    self._read_item(file, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, file: Any, item: ReadItem, planner: LoadPlanner) -> None:
        saved_at = self.storage_data[item.storage_index]
        view: Any = self._slice_file(file, saved_at)
        if saved_at.length <= _SMALL_BYTES:  # torch makes a dozen reads of a few bytes each
            view = io.BytesIO(view.read(-1))
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, view)
            return
        target = planner.resolve_tensor(item).detach()
        if any(item.storage_offsets) or not read_into(target, view):
            view.seek(0)
            saved = torch.load(view, map_location="cpu", weights_only=True)
            part = narrow_tensor_by_index(saved, item.storage_offsets, item.lengths)
            if part.shape != target.shape:
                raise ValueError(f"{item.dest_index.fqn} is {part.shape} there and {target.shape} here")
            target.copy_(part)
        planner.commit_tensor(item, target)

    def fill(self, state: dict[str, Any]) -> None:
        """Load the part into the tensors of a state.

        Raises:
            Exception: what the store's client raised, or what shows that the part is damaged.
        """
        try:
            state_dict_loader.load(state, storage_reader=self, planner=_Planner(), no_dist=True)
        except CheckpointException as error:
            failed = _cause_of(error)
        else:
            return
        raise failed

    def read(self) -> dict[str, Any]:
        """All that the part holds: tensors on the CPU, and other values, by name.

        Raises:
            Exception: as :meth:`fill` does.
        """
        state: dict[str, Any] = {
            name: torch.empty(found.size, dtype=found.properties.dtype)
            if isinstance(found, TensorStorageMetadata)
            else None
            for name, found in self.read_metadata().state_dict_metadata.items()
        }
        self.fill(state)
        return state


class _Writer(FsspecWriter):
    def __init__(self, store: Store, path: str, file_of: FileOf | None, copies: Copies | None) -> None:
        # No copying ahead: the state is on the host. A remote file is durable when it is closed and has no
        # descriptor to sync; torch would sync all disks of this machine instead.
        super().__init__(store.child_url(path), per_thread_copy_ahead=0, sync_files=not store.remote)
        self._files = _DigestedFiles(path, copies)
        self._file_of = file_of
        self.path = self._files.init_path(store.child_url(path))
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


class _DigestedFiles(FileSystem):
    """Computes the digest of each file while DCP writes it, and writes its copy.

    Args:
        part: the part's place in the store.
        copies: where the copies go.
    """

    def __init__(self, part: str, copies: Copies | None) -> None:
        super().__init__()
        self._part = part
        self._copies = copies
        self.digests: dict[str, FileDigest] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        name = _name_in(path).removesuffix(_DRAFT)  # DCP renames it at the end
        copied = (self._copies or _nowhere)(f"{self._part}/{name}")
        with super().create_stream(path, mode) as stream, copied as copy:
            digested = _DigestedStream(stream, copy)
            yield digested
        self.digests[_name_in(path)] = digested.digester.digest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[_name_in(new_path)] = self.digests.pop(_name_in(path))


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


class _VerifiedFiles(FileSystem):
    """Opens a file only if all its bytes are those that were written.

    A local file is read twice, the second time from the page cache. A file behind a network is read once,
    into memory.

    Args:
        part: the part's place in the store.
        digests: by name, what each file has to be.
        near: copies that are asked for first.
        in_memory: the store is behind a network.
    """

    def __init__(
        self, part: str, digests: Mapping[str, FileDigest], near: NearFiles | None, *, in_memory: bool
    ) -> None:
        super().__init__()
        self._part = part
        self._near = near
        self._digests = digests
        self._in_memory = in_memory

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        name = _name_in(path)
        expected = self._digests.get(name)
        if (
            self._near is not None
            and (copy := self._near.nearer(f"{self._part}/{name}", expected)) is not None
        ):
            with copy:
                yield copy
            return
        with super().create_stream(path, mode) as stream:
            file: Any = io.BytesIO(stream.read()) if self._in_memory else stream
            check_digest(name, found := digest_of_file(file), expected)
            if self._near is not None:
                self._near.from_store(found.size)
            file.seek(0)
            yield file


def check_digest(name: str, found: FileDigest, expected: FileDigest | None) -> None:
    """Compare a file of a part with what it has to be; None if the part was written without it.

    Raises:
        DamagedCheckpointError: they differ.
    """
    if expected is None:
        raise DamagedCheckpointError(f"the file {name} was not written with it", file=name)
    if found.size != expected.size:
        raise DamagedCheckpointError(
            f"the file {name} has {found.size} bytes instead of {expected.size}", file=name
        )
    if found != expected:
        raise DamagedCheckpointError(f"the file {name} does not match its digest", file=name)


def _name_in(path: str | os.PathLike[str]) -> str:
    return os.fspath(path).rsplit("/", 1)[-1]


class _Planner(DefaultLoadPlanner):
    """Reads bytes as bytes; torch's planner would unpickle any object."""

    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:
        content = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], content)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _KNOWN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{_METADATA} names {module}.{name}, which no checkpoint needs")


def _cause_of(error: CheckpointException) -> BaseException:
    """What DCP caught, on the only rank there is."""
    cause, _ = next(iter(error.failures.values()))
    return cause
