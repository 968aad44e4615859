"""Records of the log: one for each message, named by its key.

A *message* is one tensor that went from stage to stage. Its key is the paper's timestamp, made total: no two
messages of a run share one, unless a recovery repeated the iteration, and then both carry the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import xxhash

from swift_ft.errors import DivergenceError, LogCorruptError, LogMissingError, UsageError
from swift_ft.torch_core.tensors import plain_on_host, tensor_bytes


class Direction(StrEnum):
    """The direction of a message through the pipeline, or that it is none of the pipeline's."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SCRIPT = "script"
    """An operation of the script's own: what it gave to a worker, or what that worker sent in it."""


THROUGH_PIPELINE = (Direction.FORWARD, Direction.BACKWARD)
"""The directions of the pipeline's own messages."""


class RecordKind(StrEnum):
    """The kind of a record: how much of its message it keeps."""

    MESSAGE = "message"  # the payload, kept by the sender
    RECEIPT = "receipt"  # only the checksum: what a receiver got


@dataclass(frozen=True, order=True, slots=True)
class MessageKey:
    """The name of one message.

    Attributes:
        iteration: optimizer step, counted from 0.
        microbatch: index within the iteration, counted on over all calls of the schedule in it; -1 for the
            gradients of tied parameters.
        direction: forward (activations) or backward (gradients).
        source_stage: the stage that sent it.
        destination_stage: the stage that received it.
        slot: position among the tensors that one stage hands to the next for one microbatch.

    For the script's own communication: ``microbatch`` counts the operations of a group within the iteration,
    ``source_stage`` stands for the group, or for a message's group, sender, receiver and tag,
    ``destination_stage`` is the worker that logged the tensor, or that sent it (also in a receipt), and
    ``slot`` is the position among the operation's tensors.
    """

    iteration: int
    microbatch: int
    direction: Direction
    source_stage: int
    destination_stage: int
    slot: int

    def __str__(self) -> str:
        if self.direction == Direction.SCRIPT:
            return (
                f"iteration {self.iteration}, operation {self.microbatch} of the script on a group, tensor "
                f"{self.slot}, of worker {self.destination_stage}"
            )
        return (
            f"iteration {self.iteration}, microbatch {self.microbatch}, {self.direction}, "
            f"stage {self.source_stage} -> {self.destination_stage}, slot {self.slot}"
        )


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a segment.

    Attributes:
        kind: message or receipt.
        key: the message's name.
        dtype: torch's name of the element type without the prefix, ``bfloat16`` for example.
        shape: of the tensor; ``()`` for a 0-dim one.
        checksum: xxh3_64 of the raw bytes in row-major order.
        payload: those bytes, without a copy where possible; None for a receipt.
        codec: how the payload is packed (:mod:`swift_ft.logging.format.codec`); ``""`` if it is not.
    """

    kind: RecordKind
    key: MessageKey
    dtype: str
    shape: tuple[int, ...]
    checksum: int
    payload: memoryview | None
    codec: str = ""


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def checksum_of(data: torch.Tensor | Any) -> int:
    """xxh3_64 of a tensor's raw bytes, or of anything that offers the buffer protocol."""
    return xxhash.xxh3_64_intdigest(tensor_bytes(data) if isinstance(data, torch.Tensor) else data)


def changed_in_place_error(key: MessageKey) -> UsageError:
    """The error for a tensor that changed between sending and logging."""
    return UsageError(
        f"the tensor of {key} was changed in place after it had been sent, and before it was logged: send a "
        "clone of it, or change a clone",
        key=key,
    )


def copy_into(record: Record, tensor: torch.Tensor) -> None:
    """Fills an existing tensor, such as a receive buffer, with a message's payload.

    The bytes are not checked; :func:`verify` does that. Like a receive, this does not go through autograd.

    Raises:
        LogMissingError, DivergenceError, LogCorruptError: see :func:`bytes_to_fill`.
    """
    with bytes_to_fill(tensor, record) as buffer:
        assert record.payload is not None
        buffer[:] = record.payload


@contextmanager
def bytes_to_fill(tensor: torch.Tensor, record: Record) -> Iterator[memoryview]:
    """The memory that a message's payload belongs in, so that a tensor has it after the block.

    That is the tensor's own memory if it is on the host and contiguous.

    Raises:
        LogMissingError: the record is a receipt and has no payload.
        DivergenceError: the tensor's dtype or shape is not the message's.
        LogCorruptError: the payload is not as long as dtype and shape say.
    """
    if record.payload is None:
        raise LogMissingError(
            f"the log holds only a receipt of {record.key}, not its payload", key=record.key
        )
    dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    if (dtype, shape) != (record.dtype, record.shape):
        raise DivergenceError(
            f"the logged message ({record.key}) is {record.dtype}{list(record.shape)}, but the stage expects "
            f"{dtype}{list(shape)}: the model or the batch is not the one that was logged",
            key=record.key,
        )
    if record.payload.nbytes != tensor.nbytes:
        raise LogCorruptError(
            f"{record.key}: {record.payload.nbytes} bytes in the log, {tensor.nbytes} expected",
            key=record.key,
        )
    on_host = tensor.device.type == "cpu"
    plain = plain_on_host(tensor) if on_host else torch.empty(tensor.shape, dtype=tensor.dtype)
    yield tensor_bytes(plain)
    # What could not be viewed in place was filled in a copy.
    if plain.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(plain)


def verify(record: Record, *, path: str | None = None) -> None:
    """Checks a payload against its checksum; a receipt has nothing to check.

    Args:
        record: the record to check.
        path: the segment that it came from, for the error.

    Raises:
        LogCorruptError: they differ.
    """
    if record.payload is not None:
        compare(record, checksum_of(record.payload), path=path)


def compare(record: Record, checksum: int, *, path: str | None = None) -> None:
    """:func:`verify` for a payload whose checksum has been computed."""
    if checksum != record.checksum:
        where = f" in {path}" if path else ""
        raise LogCorruptError(
            f"the payload of {record.key}{where} does not match its checksum: the storage changed it",
            key=record.key,
            path=path,
        )
