"""Reads one worker's part of a checkpoint that torch's DCP wrote, without a group.

DCP alone would execute what a file names, and take every byte for the one that was written.

Private parts used (tested on torch 2.11 to 2.14):

- ``FileSystemReader`` with its ``fs.create_stream``, ``fs.concat_path``, ``path`` and the file name
  ``.metadata``. All that it reads goes through ``fs``.
- ``FileSystemReader._slice_file`` with ``storage_data``: where an item lies in its file; and
  ``torch.distributed._shard._utils.narrow_tensor_by_index``: a range of a tensor.
- ``torch.distributed.checkpoint._traverse.set_element``: puts a loaded value into a nested state.
- The classes that a pickled ``.metadata`` names (``_KNOWN``).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import IO, Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader, state_dict_loader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from swift_ft.storage.digest import FileDigest
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.errors import cause_of
from swift_ft.torch_adapters.dcp.saved_tensors import read_into
from swift_ft.torch_adapters.dcp.store_files import StoreFiles
from swift_ft.torch_adapters.dcp.verified_files import NearFiles, VerifiedFiles

torch.serialization.add_safe_globals([io.BytesIO])  # DCP stores a state's bytes as one

_METADATA = ".metadata"
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


class PartReader(FileSystemReader):
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
        super().__init__(url := store.child_url(path))
        self.path = url
        files = StoreFiles(store) if digests is None else VerifiedFiles(store, path, digests, near)
        self.fs = files  # type: ignore[assignment]  # torch declares its class for local files
        self._shown = f"{store.url}/{path}"
        self._metadata: Metadata | None = None

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's name in torch's logs: without credentials."""
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

    def kinds(self) -> dict[tuple[str, ...], tuple[torch.dtype, tuple[int, ...]]]:
        """The dtype and shape of each tensor of the part, by its path in the state."""
        stored = self.read_metadata()
        paths = stored.planner_data or {}
        return {
            paths.get(flat, tuple(flat.split("."))): (meta.properties.dtype, tuple(meta.size))
            for flat, meta in stored.state_dict_metadata.items()
            if isinstance(meta, TensorStorageMetadata)
        }

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
            failed = cause_of(error)
        else:
            return
        raise failed

    def read(self) -> dict[str, Any]:
        """All that the part holds: tensors on the CPU, and other values, by name.

        Raises:
            Exception: as :meth:`fill` does.
        """
        stored = self.read_metadata().state_dict_metadata
        state: dict[str, Any] = {name: _empty(found) for name, found in stored.items()}
        self.fill(state)
        return state


def _empty(found: object) -> torch.Tensor | None:
    """Room for a tensor; what is none replaces what stands in its place."""
    if isinstance(found, TensorStorageMetadata):
        return torch.empty(found.size, dtype=found.properties.dtype)
    return None


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
