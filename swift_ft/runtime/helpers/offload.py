"""Moves a helper's own state out of memory while it computes for others (paper §5.2)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from swift_ft.torch_core.tensors import distinct_storages

_PIECE_BYTES = 1 << 22


@contextmanager
def offload(
    tensors: Iterable[torch.Tensor], *, memory_bytes: int | None = None, folder: Path | None = None
) -> Iterator[None]:
    """Within the block, free the memory of tensors, up to a limit. Afterwards they are as before.

    Tensors on a device go to the host. What exceeds the limit on the host goes to the local disk.
    The tensors stay the same objects, with the same bits, and must not be used in the block.

    Args:
        tensors: any tensors, views of each other included. One whose memory cannot be freed stays.
        memory_bytes: host memory that all of them together may take; None for no limit.
        folder: on the local disk; by default among the system's temporary files.

    Raises:
        OSError: if the local disk is full. All tensors are unchanged then.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    room = float("inf") if memory_bytes is None else memory_bytes
    with ExitStack() as reload:
        for storage in distinct_storages(tensors):
            on_host = storage.device.type == "cpu"
            fits = storage.nbytes() <= room
            if fits:
                room -= storage.nbytes()
            # What fits on the host stays there, and has taken its share of the limit.
            if not storage.resizable() or storage.nbytes() == 0 or (on_host and fits):
                continue
            if fits:
                _to_host(storage, reload)
            else:
                _to_disk(storage, reload, folder)
        yield


def _to_host(storage: torch.UntypedStorage, reload: ExitStack) -> None:
    size, copy = storage.nbytes(), _bytes(storage).cpu()

    def load() -> None:
        storage.resize_(size)
        _bytes(storage).copy_(copy)

    # Before the memory is freed, so that no error can come in between.
    reload.callback(load)
    storage.resize_(0)


def _to_disk(storage: torch.UntypedStorage, reload: ExitStack, folder: Path | None) -> None:
    size = storage.nbytes()
    opened = tempfile.TemporaryFile(dir=folder, prefix="swift-offload-", buffering=0)  # noqa: SIM115, ends with it
    file: Any = reload.enter_context(opened)
    for piece, window in _windows(storage):
        window.copy_(piece)
        _all(file.write, window)
    file.seek(0)

    def load() -> None:
        storage.resize_(size)
        for piece, window in _windows(storage):
            _all(file.readinto, window)
            piece.copy_(window)

    # Not before all is written: if the disk is full, the tensors are as they were.
    reload.callback(load)
    storage.resize_(0)


def _windows(storage: torch.UntypedStorage) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces of a storage, each with a host buffer: a storage that NumPy has seen cannot be resized."""
    buffer = torch.empty(min(storage.nbytes(), _PIECE_BYTES), dtype=torch.uint8)
    for piece in torch.split(_bytes(storage), _PIECE_BYTES):
        yield piece, buffer[: piece.numel()]


def _all(move: Callable[[memoryview], int], window: torch.Tensor) -> None:
    """Write or read all of a buffer."""
    rest = window.numpy().data.cast("B")
    while rest:
        if not (moved := move(rest)):
            raise OSError("the state that a helper offloaded to the local disk cannot be read back in full")
        rest = rest[moved:]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
