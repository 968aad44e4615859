"""What waits in a writer's queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from swift_ft.logging.record import Kind, MessageKey, Record, checksum_of, dtype_name, tensor_bytes

__all__ = ["Cut", "Item", "QueuedReceipt", "QueuedTensor"]


class Cut:
    """Closes the segment that is open when its turn comes."""

    size = 0

    def release(self) -> None:
        """Nothing to let go of."""


@dataclass(frozen=True, slots=True)
class QueuedReceipt:
    """The receipt of a message whose checksum is known."""

    receipt: Record
    size = 0

    def record(self) -> Record:
        """What is written."""
        return self.receipt

    def release(self) -> None:
        """Nothing to let go of."""


@dataclass(frozen=True, slots=True)
class QueuedTensor:
    """A message, or one of which only the receipt is written.

    Attributes:
        kind: which of the two.
        key: the message's.
        tensor: its content, in host memory.
        version: of the tensor when it was queued.
        on_written: called when the tensor is not needed any more.
    """

    kind: Kind
    key: MessageKey
    tensor: torch.Tensor
    version: int
    on_written: Callable[[], None] | None

    @property
    def size(self) -> int:
        """Bytes that it keeps."""
        return self.tensor.nbytes

    def record(self) -> Record:
        """What is written; computes the checksum."""
        payload = tensor_bytes(self.tensor)
        dtype, shape, checksum = dtype_name(self.tensor.dtype), tuple(self.tensor.shape), checksum_of(payload)
        kept = payload if self.kind is Kind.MESSAGE else None
        return Record(self.kind, self.key, dtype, shape, checksum, kept)

    def release(self) -> None:
        """It is written, or never will be."""
        if self.on_written is not None:
            self.on_written()


Item = QueuedTensor | QueuedReceipt | Cut
