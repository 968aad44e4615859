"""Reads the payloads of a segment's records, and verifies them, in one pass over their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import xxhash

from swift_ft.errors import LogCorruptError
from swift_ft.logging.format.codec import unpack
from swift_ft.logging.format.record import Record, compare, verify
from swift_ft.storage.local_source import LocalSource


def read_payload(source: pa.NativeFile, record: Record, buffer: memoryview, *, path: str) -> None:
    """Fill a buffer with a payload that is not packed.

    Args:
        source: the segment's file.
        record: one of its messages.
        buffer: as long as the payload.
        path: of the segment, for errors.

    Raises:
        LogCorruptError: the payload does not match its checksum, or its disk does not give it.
    """
    checksum = xxhash.xxh3_64()
    for piece in _pieces(source, record, buffer, path):
        checksum.update(piece)
    compare(record, checksum.intdigest(), path=path)


def read_unpacked(source: pa.NativeFile, record: Record, *, path: str) -> Record:
    """A message with its payload in memory, unpacked; arguments and errors as for :func:`read_payload`."""
    packed = memoryview(bytearray(record.payload.nbytes if record.payload else 0))
    for _ in _pieces(source, record, packed, path):
        pass
    unpacked = unpack(replace(record, payload=packed), path=path)
    verify(unpacked, path=path)
    return unpacked


def _pieces(source: pa.NativeFile, record: Record, buffer: memoryview, path: str) -> Iterator[memoryview]:
    payload = record.payload
    assert payload is not None  # a message has one
    if not isinstance(source, LocalSource):  # it is in memory
        buffer[:] = payload
        yield buffer
        return
    try:
        yield from source.read_into(payload, buffer)
    except OSError as error:
        raise LogCorruptError(
            f"the payload of {record.key} in {path} cannot be read: {error}", key=record.key, path=path
        ) from error
