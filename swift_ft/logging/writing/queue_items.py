"""The items of a writer's queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from swift_ft.logging.format.record import (
    MessageKey,
    Record,
    RecordKind,
    checksum_of,
    dtype_name,
    tensor_bytes,
)


class Roll:
    """Closes the segment that is open when its turn comes."""

    size = 0
    iteration = None

    def release(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True, slots=True)
class QueuedReceipt:
    """A receipt with a known checksum."""

    receipt: Record
    size = 0

    @property
    def iteration(self) -> int:
        """The message's."""
        return self.receipt.key.iteration

    def record(self) -> Record:
        """The record to write."""
        return self.receipt

    def release(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True, slots=True)
class QueuedTensor:
    """A message to write, or to write only the receipt of.

    Attributes:
        kind: which of the two.
        key: the message's.
        tensor: its content, in host memory.
        version: of the tensor when it was queued.
        on_written: called when the tensor is no longer needed.
    """

    kind: RecordKind
    key: MessageKey
    tensor: torch.Tensor
    version: int
    on_written: Callable[[], None] | None

    @property
    def iteration(self) -> int:
        """The message's."""
        return self.key.iteration

    @property
    def size(self) -> int:
        """Bytes of memory that the item holds."""
        return self.tensor.nbytes

    def record(self) -> Record:
        """The record to write; computes the checksum."""
        payload = tensor_bytes(self.tensor)
        dtype, shape, checksum = dtype_name(self.tensor.dtype), tuple(self.tensor.shape), checksum_of(payload)
        kept = payload if self.kind is RecordKind.MESSAGE else None
        return Record(self.kind, self.key, dtype, shape, checksum, kept)

    def release(self) -> None:
        """Calls ``on_written``: the item is written, or never will be."""
        if self.on_written is not None:
            self.on_written()


QueueItem = QueuedTensor | QueuedReceipt | Roll
