"""Shared by the tests of the log: keys, segments written in one go, and a store whose writes wait."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest
import torch

from swift_ft.logging import Direction, LogReader, MessageKey, SegmentIdentity, checksum_of
from swift_ft.logging.format.record import Record, RecordKind, dtype_name
from swift_ft.logging.format.segment import SegmentWriter
from swift_ft.storage.atomic_file import AtomicFile
from swift_ft.storage.store import Store
from swift_ft.torch_core.tensors import tensor_bytes

RUN = "run-1"
LOG = "log/rank00000"


def key(iteration: int = 0, microbatch: int = 0, **changes: int | Direction) -> MessageKey:
    """A message key; any field can be changed."""
    fields = {"direction": Direction.FORWARD, "source_stage": 0, "destination_stage": 1, "slot": 0, **changes}
    return MessageKey(iteration, microbatch, **fields)  # type: ignore[arg-type]


def identity(generation: int = 0, run_id: str = RUN, rank: int = 0) -> SegmentIdentity:
    """The identity of the segments of one worker."""
    return SegmentIdentity(run_id, rank, generation)


def message(name: MessageKey, tensor: torch.Tensor) -> Record:
    """A message with its payload."""
    payload = tensor_bytes(tensor)
    return Record(
        RecordKind.MESSAGE, name, dtype_name(tensor.dtype), tuple(tensor.shape), checksum_of(payload), payload
    )


def events_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The events of all records that were logged."""
    return [record.event for record in caplog.records if hasattr(record, "event")]


def receipt(name: MessageKey, checksum: int) -> Record:
    """A receipt: the key and the checksum of a received message."""
    return Record(RecordKind.RECEIPT, name, "float32", (2,), checksum, None)


def load(reader: LogReader, iterations: Iterable[int] = range(10)) -> LogReader:
    """A reader that has opened all segments of some iterations, and so found what is wrong with them."""
    reader.refresh()
    for iteration in iterations:
        reader.keys(iteration)
    return reader


def read_all(reader: LogReader, iteration: int) -> dict[MessageKey, torch.Tensor]:
    """All messages of an iteration, in the order in which they were logged."""
    return {name: reader.read(name) for name in reader.keys(iteration)}


def write_segment(
    store: Store,
    records: Iterable[Record],
    who: SegmentIdentity | None = None,
    sequence: int = 0,
    directory: str = LOG,
) -> str:
    """Writes and commits one segment. Returns its path."""
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

    def open_write(self, path: str) -> AtomicFile:
        """Waits for the gate, then opens the file."""
        self.waiting.set()
        if not self.gate.wait(60):
            raise TimeoutError("the test never opened the gate")
        return super().open_write(path)


class FullStore(Store):
    """A disk without room."""

    def open_write(self, path: str) -> AtomicFile:
        """Raises ENOSPC."""
        raise OSError(28, "No space left on device")


class RemoteStore(Store):
    """A directory that counts as one behind a network."""

    @property
    def remote(self) -> bool:
        """True: the log uploads to it from a local tier."""
        return True
