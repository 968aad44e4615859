"""Digests of what a script trains on: two batches that differ have different ones, as good as always.

A tensor in host memory is hashed at once. One on a GPU is reduced there to a single number, whose copy to the
host it is in the background. Of a large tensor, evenly spaced blocks stand for the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from swift_ft.checkpoint.state_digest import weighted_sum
from swift_ft.torch_core.tensors import tensor_bytes

_BLOCK_BYTES = 4096
_BLOCKS = 256
_WHOLE_BYTES = _BLOCKS * _BLOCK_BYTES
"""A larger tensor is hashed in blocks only."""


class BatchDigest:
    """The digest of tensors, and of plain values among them, in lists, tuples and dictionaries.

    Args:
        values: what a script gave to a schedule or a model.

    Attributes:
        empty: there are no tensors in it.
        settled: it was ready before an abort, which may leave anything in what comes later.
    """

    def __init__(self, values: Any) -> None:
        self._hash = xxhash.xxh3_64()
        self.empty, self.settled = True, False
        reduced: list[torch.Tensor] = []
        for value in _leaves(values):
            if isinstance(value, torch.Tensor):
                self.empty = False
                self._add(value.to_local() if isinstance(value, DTensor) else value, reduced)
            else:
                self._hash.update(repr(value).encode())
        self._reduced: torch.Tensor | None = None
        if reduced:
            self._copy_to_host(reduced)

    @property
    def ready(self) -> bool:
        """Whether :attr:`value` need not wait for a GPU."""
        return self._reduced is None or self._arrived.query()

    @property
    def value(self) -> str:
        """The digest, 16 hexadecimal digits. Waits for the GPU where it must."""
        if self._reduced is not None:
            self._arrived.synchronize()
            self._hash.update(tensor_bytes(self._reduced))
            self._reduced = None
        return self._hash.hexdigest()

    def _add(self, tensor: torch.Tensor, reduced: list[torch.Tensor]) -> None:
        self._hash.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout == torch.strided
        if not plain or tensor.is_meta or tensor.is_nested or tensor.numel() == 0:
            return
        tensor = tensor.detach()
        if tensor.device.type == "cuda":
            if not torch.cuda.is_current_stream_capturing():
                reduced.append(reduce_on_device(tensor))
            return
        data = tensor_bytes(tensor)
        for start in _block_starts(data.nbytes):
            self._hash.update(data[start : start + _BLOCK_BYTES])
        if data.nbytes <= _WHOLE_BYTES:
            self._hash.update(data)

    def _copy_to_host(self, reduced: list[torch.Tensor]) -> None:
        numbers = torch.stack([number.to(reduced[0].device) for number in reduced])
        self._reduced = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._reduced.copy_(numbers, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(numbers.device))


def digest_of(values: Any) -> int:
    """The digest of what a script gave to a schedule or a model. Waits for the GPU where it must."""
    return int(BatchDigest(values).value, 16)


def reduce_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A number that depends on all bytes of a small tensor, or on evenly spaced blocks of a large one.

    Returns:
        int64, no dimensions, on the tensor's device, as :func:`weighted_sum` says.
    """
    data = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if data.numel() > _WHOLE_BYTES:
        blocks = data.unfold(0, _BLOCK_BYTES, data.numel() // _BLOCKS)[: _BLOCKS - 1]
        data = torch.cat((blocks.reshape(-1), data[-_BLOCK_BYTES:]))
    return weighted_sum(data)


def _block_starts(size: int) -> Iterator[int]:
    """Offsets in bytes of the blocks of a large tensor; none for a tensor that is hashed as a whole."""
    if size > _WHOLE_BYTES:
        step = size // _BLOCKS
        yield from range(0, (_BLOCKS - 1) * step, step)
        yield size - _BLOCK_BYTES


def _leaves(value: Any) -> Iterator[Any]:
    """Tensors and plain values. Objects of other kinds say nothing about the data."""
    if isinstance(value, Mapping):
        for key in value:
            yield str(key)
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _leaves({field.name: getattr(value, field.name) for field in fields(value)})
    elif isinstance(value, torch.Tensor | int | float | str | bytes):
        yield value
