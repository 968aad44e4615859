"""One worker's part of a checkpoint, as torch's DCP writes and reads it, without a group.

What DCP lacks for our use: its errors say what failed only inside of an exception that is no ``Exception``,
its reader executes whatever a file names, and its writer puts the URL, with its credentials, into a file.
"""

from __future__ import annotations

import io
import pickle
import warnings
from typing import IO, Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from swift_ft.logging import Store

__all__ = ["PartReader", "staged", "write_part"]

# It warns in threads, where no context manager reaches. That DCP works without a group is meant, and what an
# attempt that failed left is replaced by the next one.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
warnings.filterwarnings("ignore", message="Detected an existing checkpoint in")

torch.serialization.add_safe_globals([io.BytesIO])  # as which a state's bytes are stored

_METADATA = ".metadata"
# What DCP's description of a checkpoint consists of, besides dtypes.
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
    """A copy of a state on the host: what comes after does not change it."""
    copy: dict[str, Any] = BlockingAsyncStager().stage(state)
    return copy


def write_part(store: Store, path: str, state: dict[str, Any]) -> None:
    """Write a part, over whatever an attempt before it left.

    Args:
        store: where.
        path: the part's place there.
        state: on the host.

    Raises:
        Exception: what the store's client raised.
    """
    try:
        state_dict_saver.save(state, storage_writer=_Writer(store, path), no_dist=True)
    except CheckpointException as error:
        failed = _cause_of(error)
    else:
        return
    raise failed


class PartReader(FsspecReader):
    """Reads a part, and executes nothing that its files say.

    Args:
        store: where.
        path: the part's place there.
    """

    def __init__(self, store: Store, path: str) -> None:
        super().__init__(store.child_url(path))
        self._shown = f"{store.url}/{path}"

    @property
    def checkpoint_id(self) -> str:
        """What torch logs."""
        return self._shown

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the part consists of. See :class:`torch.distributed.checkpoint.StorageReader`."""
        with self.fs.create_stream(self.fs.concat_path(self.path, _METADATA), "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"{_METADATA} holds {type(metadata).__name__}")
        return metadata

    def fill(self, state: dict[str, Any]) -> None:
        """Load the part into the tensors of a state.

        Raises:
            Exception: what the store's client raised, or what was found to be damaged.
        """
        try:
            state_dict_loader.load(state, storage_reader=self, planner=_Planner(), no_dist=True)
        except CheckpointException as error:
            failed = _cause_of(error)
        else:
            return
        raise failed


class _Writer(FsspecWriter):
    def __init__(self, store: Store, path: str) -> None:
        # Nothing is copied ahead: the state is on the host already. A remote file, which has no descriptor to
        # sync, is durable when it is closed: torch would sync all disks of this machine instead.
        super().__init__(store.child_url(path), per_thread_copy_ahead=0, sync_files=not store.remote)
        self._shown = f"{store.url}/{path}"

    @property
    def checkpoint_id(self) -> str:
        return self._shown


class _Planner(DefaultLoadPlanner):
    """Reads bytes as bytes; torch's own would unpickle any object."""

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
    """What DCP caught, on the only worker that there is."""
    cause, _ = next(iter(error.failures.values()))
    return cause
