"""What the log's tests share: keys, segments written in one go, and a store whose writes wait."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from swift_ft.logging import (
    Direction,
    Kind,
    MessageKey,
    PendingFile,
    Record,
    SegmentIdentity,
    SegmentWriter,
    Store,
    checksum_of,
    dtype_name,
    tensor_bytes,
)

RUN = "run-1"
LOG = "log/rank00000"


def key(iteration: int = 0, microbatch: int = 0, **changes: int | Direction) -> MessageKey:
    fields = {"direction": Direction.FORWARD, "source_stage": 0, "destination_stage": 1, "slot": 0, **changes}
    return MessageKey(iteration, microbatch, **fields)  # type: ignore[arg-type]


def identity(generation: int = 0, run_id: str = RUN, rank: int = 0) -> SegmentIdentity:
    return SegmentIdentity(run_id, rank, generation)


def message(name: MessageKey, tensor: torch.Tensor) -> Record:
    payload = tensor_bytes(tensor)
    return Record(
        Kind.MESSAGE, name, dtype_name(tensor.dtype), tuple(tensor.shape), checksum_of(payload), payload
    )


def receipt(name: MessageKey, checksum: int) -> Record:
    return Record(Kind.RECEIPT, name, "float32", (2,), checksum, None)


def write_segment(
    store: Store,
    records: Iterable[Record],
    who: SegmentIdentity | None = None,
    sequence: int = 0,
    directory: str = LOG,
) -> str:
    writer = SegmentWriter(store, directory, who or identity(), sequence)
    for record in records:
        writer.append(record)
    return writer.commit()


class BlockedStore(Store):
    """Files can be opened for writing only after ``gate`` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.gate = threading.Event()
        self.waiting = threading.Event()

    def open_write(self, path: str) -> PendingFile:
        self.waiting.set()
        if not self.gate.wait(60):
            raise TimeoutError("the test never opened the gate")
        return super().open_write(path)


class FullStore(Store):
    """A disk without room."""

    def open_write(self, path: str) -> PendingFile:
        raise OSError(28, "No space left on device")


class RemoteStore(Store):
    """A directory that counts as one behind a network."""

    @property
    def remote(self) -> bool:
        return True
