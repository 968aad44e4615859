"""A worker's state in one block of host memory: copied fast, sent as it is, read back.

    length of header | length of plain bytes | header | plain bytes | tensors, each at a multiple of 64

The same block is what the worker keeps and what another machine holds for it. Of a sharded tensor (a DTensor)
the worker's own part counts.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from swift_ft.checkpoint.state_digest import listed
from swift_ft.checkpoint.state_payload import (
    StatePath,
    StatePayload,
    TensorKind,
    kinds_in,
    tensor_at,
)
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import RecoveryError

_ALIGNED = 64
_LENGTHS = 16
_ROOM = 1 << 16
"""Bytes beyond the first copy: step counters and schedulers grow by a few digits."""


@dataclass(slots=True)
class Block:
    """Host memory for one copy of a state.

    Attributes:
        data: all of it, as bytes; longer than the copy.
        length: bytes of the copy.
        under_way: the ends of copies, one on each device that still copies into it. The training thread puts
            them in; who takes them out waits first.
    """

    data: torch.Tensor
    length: int
    under_way: list[Any] = field(default_factory=list)

    def finish(self) -> None:
        """Wait until all devices have copied everything."""
        for end in self.under_way:
            end.synchronize()
        self.under_way = []

    @property
    def view(self) -> memoryview:
        """The bytes of the copy."""
        return self.data.numpy().data[: self.length]


def digest_of(block: Block) -> int:
    """One number of all bytes of a copy. They lie in host memory, where no checksum is faster."""
    return xxhash.xxh3_64_intdigest(block.view)


def size_of(state: TrainingState) -> int:
    """Bytes of a copy of the present state."""
    payload = StatePayload.of(state.to_save())
    return _begin(payload.header, payload.plain) + _length(payload.kinds)


def write_block(state: TrainingState, into: Block | None) -> Block:
    """Copy the present state. Its device may still be copying when this returns.

    Args:
        state: what a session protects.
        into: a block that may be used again; a new one is made if it is too small.

    Raises:
        UnsupportedError: a value of the state could not be read again.
    """
    payload = StatePayload.of(state.to_save())
    header = payload.header
    begin = _begin(header, payload.plain)
    length = begin + _length(payload.kinds)
    devices = {tensor.device for tensor in payload.tensors.values() if tensor.is_cuda}
    if into is None or into.data.numel() < length:
        data = torch.empty(_rounded(length + _ROOM), dtype=torch.uint8, pin_memory=bool(devices))
    else:
        data = into.data
    lengths = len(header).to_bytes(8, "little") + len(payload.plain).to_bytes(8, "little")
    _fill(data, lengths + header + payload.plain, begin)
    with torch.no_grad():
        for (at, kind), tensor in zip(_places(payload.kinds, begin), payload.tensors.values(), strict=True):
            _part(data, at, kind).copy_(tensor.detach(), non_blocking=True)
    return Block(data, length, [_end_of_copies(device) for device in devices])


def _end_of_copies(device: torch.device) -> torch.cuda.Event:
    """Each copy runs on the current stream of the device that it comes from, whichever device is current."""
    end = torch.cuda.Event()
    end.record(torch.cuda.current_stream(device))
    return end


def load_block(state: TrainingState, block: Block) -> None:
    """Make a copy the state again.

    Raises:
        TopologyMismatchError: the copy is of another model.
        RecoveryError: an optimizer has made other values of those that were copied.
    """
    block.finish()
    copied = payload_of(block)
    kinds = copied.kinds
    state.check(kinds)
    filled = state.to_load(kinds)
    with torch.no_grad():
        for path, tensor in copied.tensors.items():
            tensor_at(filled, path).copy_(tensor)
    filled["plain"]["bytes"] = io.BytesIO(copied.plain)
    state.take_over(filled)
    if names := state.differing_from(filled):
        raise RecoveryError(f"the state is not the one that was copied: {listed(names)} differ")


def payload_of(block: Block) -> StatePayload:
    """The copy in a block: its tensors are views of the block's memory."""
    raw = block.view
    header_length, plain_length = (int.from_bytes(raw[at : at + 8], "little") for at in (0, 8))
    plain_at = _LENGTHS + header_length
    header, plain = bytes(raw[_LENGTHS:plain_at]), bytes(raw[plain_at:][:plain_length])
    kinds = kinds_in(header)
    places = _places(kinds, _begin(header, plain))
    tensors = {path: _part(block.data, *place) for path, place in zip(kinds, places, strict=True)}
    return StatePayload(tensors, plain)


def _part(data: torch.Tensor, at: int, kind: TensorKind) -> torch.Tensor:
    size = kind.nbytes
    return data[at : at + size].view(kind.dtype).view(kind.shape)


def _places(kinds: Mapping[StatePath, TensorKind], begin: int) -> Iterator[tuple[int, TensorKind]]:
    at = begin
    for kind in kinds.values():
        yield at, kind
        at += _rounded(kind.nbytes)


def _length(kinds: Mapping[StatePath, TensorKind]) -> int:
    return sum(_rounded(kind.nbytes) for kind in kinds.values())


def _begin(header: bytes, plain: bytes) -> int:
    return _rounded(_LENGTHS + len(header) + len(plain))


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _fill(data: torch.Tensor, head: bytes, begin: int) -> None:
    """The head and its padding: every byte of a block is known, so that digests agree."""
    padded = head + bytes(begin - len(head))
    data[:begin] = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
