"""The items of a writer's queue, and the gap that they leave while the log cannot be written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from swift_ft.logging.format.record import MessageKey, Record, RecordKind, checksum_of, dtype_name
from swift_ft.torch_core.tensors import tensor_bytes


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


class SuspendedError(Exception):
    """The log was suspended while the thread wrote a record."""


class Suspension:
    """The messages that a writer drops. Not thread-safe: the writer's lock guards it.

    A gap ends between two iterations: messages are dropped while the log is suspended, and from then on until
    the iteration ends.

    Attributes:
        reason: why nothing is logged now; empty if it is.
        whole_from: the first iteration after the last gap.
    """

    def __init__(self) -> None:
        self.reason, self.whole_from = "", 0
        self._latest = -1

    def drops(self, iteration: int | None) -> bool:
        """Whether an item is in the gap. Call it at least once for each item that is to be queued.

        Args:
            iteration: the item's; None without a message.
        """
        if iteration is None:
            return bool(self.reason)
        self._latest = max(self._latest, iteration)
        return bool(self.reason) or iteration < self.whole_from

    def begin(self, reason: str) -> bool:
        """The log cannot be written. False if that is known already."""
        known, self.reason = bool(self.reason), self.reason or reason
        return not known

    def end(self) -> int:
        """The log can be written again. Returns the first iteration that will be whole."""
        self.reason, self.whole_from = "", self._latest + 1
        return self.whole_from
