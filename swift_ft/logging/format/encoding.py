"""One record as an Arrow record batch and back, and a segment's identity as schema metadata."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
import xxhash

from swift_ft.logging.format.record import Direction, MessageKey, Record, RecordKind

FORMAT_VERSION = 2
SCHEMA = pa.schema(
    [
        ("iteration", pa.int64()),
        ("microbatch", pa.int64()),
        ("direction", pa.string()),
        ("source_stage", pa.int64()),
        ("destination_stage", pa.int64()),
        ("slot", pa.int64()),
        ("kind", pa.string()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("checksum", pa.uint64()),
        ("codec", pa.string()),
        ("payload", pa.large_binary()),
    ]
)
_FOOTER = "footer"
_METADATA_PREFIX = "swift_ft."
_NO_PAYLOAD = pa.nulls(1, pa.large_binary())


@dataclass(frozen=True)
class SegmentIdentity:
    """The writer of a segment.

    Attributes:
        run_id: the run that it belongs to.
        rank: the worker that wrote it.
        generation: the membership in which it was written.
    """

    run_id: str
    rank: int
    generation: int


@dataclass(frozen=True)
class Footer:
    """The last batch of a segment. In the columns: ``shape`` is ``[records]``, ``checksum`` the seal.

    Attributes:
        records: how many precede it.
        seal: what :class:`Seal` computed over them.
    """

    records: int
    seal: int


class Seal:
    """xxh3_64 over a segment's metadata and, in order, over all of each record but the payload's bytes.

    A payload is represented by its checksum. docs/log-format.md says what is hashed, byte by byte.
    """

    def __init__(self, identity: SegmentIdentity, sequence: int) -> None:
        lines = [f"{name}={value}\n" for name, value in sorted(_metadata(identity, sequence).items())]
        self._hash = xxhash.xxh3_64("".join(lines).encode())

    def add(self, record: Record) -> None:
        """Adds the next record."""
        key = record.key
        self._hash.update(
            f"{record.kind} {key.iteration} {key.microbatch} {key.direction} {key.source_stage} "
            f"{key.destination_stage} {key.slot} {record.dtype} {','.join(map(str, record.shape))} "
            f"{record.checksum} {record.codec}\n".encode()
        )

    def value(self) -> int:
        """The hash so far."""
        return self._hash.intdigest()


def schema_of(identity: SegmentIdentity, sequence: int) -> pa.Schema:
    """The schema of a segment, with format version, identity and sequence as metadata."""
    return SCHEMA.with_metadata(_metadata(identity, sequence))


def identity_of(schema: pa.Schema) -> tuple[SegmentIdentity, int]:
    """Identity and sequence in a segment's schema. Raises ValueError or KeyError if it is not a segment's."""
    metadata = {name.decode(): value.decode() for name, value in (schema.metadata or {}).items()}
    version = metadata[f"{_METADATA_PREFIX}format_version"]
    if version != str(FORMAT_VERSION):
        raise ValueError(f"format version {version[:20]}, and this swift_ft reads {FORMAT_VERSION}")
    if not schema.equals(SCHEMA):
        raise ValueError("its columns are not those of a log segment")
    run_id, rank, generation, sequence = (
        metadata[_METADATA_PREFIX + name] for name in ("run_id", "rank", "generation", "sequence")
    )
    return SegmentIdentity(run_id, int(rank), int(generation)), int(sequence)


def encode(entry: Record | Footer) -> pa.RecordBatch:
    """A record batch of one row, whose payload is the record's own memory."""
    # This runs in a thread that shares the GIL with training. One message's columns resemble the last one's:
    # all but checksum and payload come from a cache.
    if isinstance(entry, Footer):
        columns = [
            *(_int_column(0), _int_column(0), _string_column("")),
            *(_int_column(0), _int_column(0), _int_column(0)),
            *(_string_column(_FOOTER), _string_column(""), _shape_column((entry.records,))),
            *(_checksum_column(entry.seal), _string_column(""), _NO_PAYLOAD),
        ]
    else:
        key = entry.key
        columns = [
            *(_int_column(key.iteration), _int_column(key.microbatch), _string_column(key.direction)),
            *(_int_column(key.source_stage), _int_column(key.destination_stage), _int_column(key.slot)),
            *(_string_column(entry.kind), _string_column(entry.dtype), _shape_column(entry.shape)),
            *(_checksum_column(entry.checksum), _string_column(entry.codec), _payload_column(entry.payload)),
        ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def batches(source: pa.NativeFile, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The record batches that follow a schema, mapped where the source is. Raises on anything else."""
    while True:
        message = pa.ipc.read_message(source)
        if message.type != "record batch":
            raise ValueError(f"a {message.type} message")
        # Arrow would unpack it before its size can be checked. We never write compressed batches.
        if _body_is_compressed(memoryview(message.metadata)):
            raise ValueError("a batch that Arrow compressed")
        yield pa.ipc.read_record_batch(message, schema)


def _body_is_compressed(metadata: memoryview) -> bool:
    """Whether `compression` of `RecordBatch` is set in a message's flatbuffer (Arrow's Message.fbs)."""
    message = _u32(metadata, 0)
    header = _field(metadata, message, 2)  # after version and type of the header
    batch = header + _u32(metadata, header)
    return _field(metadata, batch, 3) != batch  # after length, nodes and buffers


def _field(data: memoryview, table: int, index: int) -> int:
    """The offset of a table's field; the table's own offset if the field is not set."""
    (to_vtable,) = struct.unpack_from("<i", data, table)
    vtable = table - to_vtable
    entry = 4 + 2 * index
    if entry >= struct.unpack_from("<H", data, vtable)[0]:
        return table
    return table + int(struct.unpack_from("<H", data, vtable + entry)[0])


def _u32(data: memoryview, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def decode(batch: pa.RecordBatch) -> Record | Footer:
    """The inverse of :func:`encode`, without copying the payload. Raises if the batch is neither."""
    # Offsets and lengths come from the file: check them against the buffers before they are used.
    batch.validate(full=True)
    if batch.num_rows != 1:
        raise ValueError(f"a batch of {batch.num_rows} rows")
    row: list[Any] = [*(column[0].as_py() for column in batch.columns[:-1]), batch.columns[-1]]
    return _entry(*row)


def decode_all(batches: Sequence[pa.RecordBatch]) -> Iterator[Record | Footer]:
    """Decode batches as :func:`decode` does, in a fraction of the time: a column of all at once.

    Raises:
        Exception: at the first batch that :func:`decode` refuses, once those before it have been taken.
    """
    try:
        table = pa.Table.from_batches(batches)
        table.validate(full=True)
        heads = [column.to_pylist() for column in table.columns[:-1]]
        payloads = table.columns[-1].chunks
        plain = len(payloads) == len(batches) == table.num_rows
    except (ValueError, pa.ArrowException):
        plain = False
    if plain:
        yield from map(_entry, *heads, payloads)
    else:
        yield from map(decode, batches)


def _entry(
    iteration: int,
    microbatch: int,
    direction: str,
    source_stage: int,
    destination_stage: int,
    slot: int,
    kind: str,
    dtype: str,
    shape: list[int],
    checksum: int,
    codec: str,
    payload_column: pa.Array,
) -> Record | Footer:
    """From the values of a row, in the order of the schema; the last one as an array of one element."""
    if kind == _FOOTER:
        (records,) = shape
        return Footer(records, checksum)
    payload = _payload_of(payload_column)
    if (payload is None) != (kind == RecordKind.RECEIPT):
        raise ValueError("a message without payload, or a receipt with one")
    key = MessageKey(iteration, microbatch, Direction(direction), source_stage, destination_stage, slot)
    return Record(RecordKind(kind), key, dtype, tuple(shape), checksum, payload, codec)


# Columns are made of buffers. The first `pa.array()` of a process imports pandas, which takes 0.2 s: in a
# thread beside training, and in a replacement while all others wait for it.


@lru_cache(maxsize=4096)
def _int_column(value: int) -> pa.Array:
    return _ints((value,))


@lru_cache(maxsize=256)
def _string_column(value: str) -> pa.Array:
    data = value.encode()
    return pa.Array.from_buffers(pa.string(), 1, [None, _offsets(len(data)), pa.py_buffer(data)])


@lru_cache(maxsize=256)
def _shape_column(value: tuple[int, ...]) -> pa.Array:
    type_ = pa.list_(pa.int64())
    return pa.Array.from_buffers(type_, 1, [None, _offsets(len(value))], children=[_ints(value)])


def _ints(values: tuple[int, ...]) -> pa.Array:
    data = struct.pack(f"<{len(values)}q", *values)
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(data)])


def _offsets(length: int) -> pa.Buffer:
    """Of the only element of a string or list column."""
    return pa.py_buffer(struct.pack("<ii", 0, length))


def _checksum_column(value: int) -> pa.Array:
    return pa.Array.from_buffers(pa.uint64(), 1, [None, pa.py_buffer(struct.pack("<Q", value))])


def _payload_column(payload: memoryview | None) -> pa.Array:
    if payload is None:
        return _NO_PAYLOAD
    offsets = pa.py_buffer(struct.pack("<qq", 0, payload.nbytes))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(payload)])


def _payload_of(column: pa.Array) -> memoryview | None:
    if column.null_count:
        return None
    # Not through a scalar: making one reads all bytes, and so would fault in the whole map.
    _, offsets, data = column.buffers()
    start, end = struct.unpack("<qq", memoryview(offsets)[:16])
    # As unsigned bytes, like the views of tensors; a view of nothing cannot be cast.
    return memoryview(data).cast("B")[start:end] if end > start else memoryview(b"")


def _metadata(identity: SegmentIdentity, sequence: int) -> dict[str, str]:
    fields = {"format_version": FORMAT_VERSION, **asdict(identity), "sequence": sequence}
    return {f"{_METADATA_PREFIX}{name}": str(value) for name, value in fields.items()}
