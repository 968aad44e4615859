"""A helper's own state, out of the way while it computes for others (paper §5.2)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = ["put_aside"]

_PIECE_BYTES = 1 << 22


@contextmanager
def put_aside(
    tensors: Iterable[torch.Tensor], *, memory_bytes: int | None = None, folder: Path | None = None
) -> Iterator[None]:
    """Within the block, give away the memory that tensors take, but for a part; afterwards all is as before.

    What is on a device goes to the host. What is, or would come, on the host beyond the limit goes to the
    local disk. The tensors stay the same objects, with the same bits, and must not be used meanwhile.

    Args:
        tensors: any, views of each other included. Those whose memory cannot be given away stay as they are.
        memory_bytes: what all of them may take of the host's memory; None for no limit.
        folder: on the local disk; by default among the system's temporary files.

    Raises:
        OSError: the disk does not take it. Nothing is changed then.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    room = float("inf") if memory_bytes is None else memory_bytes
    with ExitStack() as undone:
        for storage in storages.values():
            on_host = storage.device.type == "cpu"
            fits = storage.nbytes() <= room
            if fits:
                room -= storage.nbytes()
            if not storage.resizable() or storage.nbytes() == 0 or (on_host and fits):
                continue
            if fits:
                _to_host(storage, undone)
            else:
                _to_disk(storage, undone, folder)
        yield


def _to_host(storage: torch.UntypedStorage, undone: ExitStack) -> None:
    size, copy = storage.nbytes(), _bytes(storage).cpu()

    def back() -> None:
        storage.resize_(size)
        _bytes(storage).copy_(copy)

    undone.callback(back)
    storage.resize_(0)


def _to_disk(storage: torch.UntypedStorage, undone: ExitStack, folder: Path | None) -> None:
    size = storage.nbytes()
    opened = tempfile.TemporaryFile(dir=folder, prefix="swift-aside-", buffering=0)  # noqa: SIM115, ends with it
    file: Any = undone.enter_context(opened)
    for piece, window in _windows(storage):
        window.copy_(piece)
        _all(file.write, window)
    file.seek(0)

    def back() -> None:
        storage.resize_(size)
        for piece, window in _windows(storage):
            _all(file.readinto, window)
            piece.copy_(window)

    undone.callback(back)
    storage.resize_(0)


def _windows(storage: torch.UntypedStorage) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces of a storage, each with a buffer on the host: what NumPy has seen can never be resized."""
    buffer = torch.empty(min(storage.nbytes(), _PIECE_BYTES), dtype=torch.uint8)
    for piece in torch.split(_bytes(storage), _PIECE_BYTES):
        yield piece, buffer[: piece.numel()]


def _all(move: Callable[[memoryview], int], window: torch.Tensor) -> None:
    """Write or read all of a buffer."""
    rest = window.numpy().data.cast("B")
    while rest:
        if not (moved := move(rest)):
            raise OSError("a helper's state was put aside on the local disk, and does not come back whole")
        rest = rest[moved:]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
