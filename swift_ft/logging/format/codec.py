"""Payloads made smaller: zstd, over byte planes where that helps.

The exponents of neighbouring floating-point numbers resemble each other and compress; their mantissas do not.
*Planes* put the first bytes of all elements together, then all second bytes, and so on.
``benchmarks/logging/codec.py`` measures what each codec costs and saves on real activations and gradients.
The default is to pack nothing, since most stores take bytes faster than a core packs them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from swift_ft.errors import LogCorruptError
from swift_ft.logging.format.record import Record

MAX_PACKED_MESSAGE_BYTES = 16 << 30
"""A header that claims more than this is rejected."""


class Codec(StrEnum):
    """The packing of a payload."""

    NONE = ""
    ZSTD = "zstd"  # one zstd frame
    ZSTD_PLANES = "zstd-planes"  # one zstd frame over the byte planes of the elements


def codec_for(dtype: str) -> Codec:
    """The codec that packed a dtype best in measurements: planes for floats of several bytes."""
    kind = getattr(torch, dtype)
    return Codec.ZSTD_PLANES if kind.is_floating_point and kind.itemsize > 1 else Codec.ZSTD


def pack(record: Record, codec: Codec, level: int = 1) -> Record:
    """The record with its payload packed, or unchanged if that saves nothing.

    Args:
        record: a message that is not packed.
        codec: the codec to use.
        level: zstd's level, 1 (fast) to 19.
    """
    if codec is Codec.NONE or not record.payload:
        return record
    raw: Any = record.payload
    if codec is Codec.ZSTD_PLANES:
        raw = _transposed(record.payload, getattr(torch, record.dtype).itemsize, to_planes=True)
    packed = memoryview(pa.Codec("zstd", compression_level=level).compress(pa.py_buffer(raw))).cast("B")
    return record if packed.nbytes >= record.payload.nbytes else replace(record, payload=packed, codec=codec)


def unpack(record: Record, *, path: str | None = None) -> Record:
    """The record with the payload that was sent. Does not check its checksum.

    Raises:
        LogCorruptError: the payload is not what the codec writes, or has another size.
    """
    if not record.codec or record.payload is None:
        return record
    try:
        codec = Codec(record.codec)
        itemsize = getattr(torch, record.dtype).itemsize
        size = _checked_size(math.prod(record.shape) * itemsize)
        raw = memoryview(pa.Codec("zstd").decompress(pa.py_buffer(record.payload), size)).cast("B")
        if codec is Codec.ZSTD_PLANES:
            raw = _transposed(raw, itemsize, to_planes=False)
    except (ValueError, AttributeError, MemoryError, OSError) as error:
        where = f" in {path}" if path else ""
        raise LogCorruptError(
            f"the payload of {record.key}{where} cannot be unpacked ({record.codec!r}): {error}",
            key=record.key,
            path=path,
        ) from error
    return replace(record, payload=raw, codec=Codec.NONE)


def _checked_size(size: int) -> int:
    if not 0 < size <= MAX_PACKED_MESSAGE_BYTES:
        raise ValueError(f"it would be {size} bytes")
    return size


def _transposed(data: memoryview, itemsize: int, *, to_planes: bool) -> memoryview:
    shape = (-1, itemsize) if to_planes else (itemsize, -1)
    array = np.frombuffer(data, np.uint8).reshape(shape)
    return np.ascontiguousarray(array.T).reshape(-1).data
