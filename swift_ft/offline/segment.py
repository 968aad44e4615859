"""A look into one log segment: its content, and whether all of it can be used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch

from swift_ft.errors import LogCorruptError, LogTornError, UsageError, first_line
from swift_ft.logging.format.record import Direction, Record, RecordKind
from swift_ft.logging.format.segment import parse_segment, parse_segment_name
from swift_ft.offline.log_check import payload_damage
from swift_ft.storage.read_only import ReadOnlyStore


@dataclass(frozen=True, slots=True)
class BoundarySummary:
    """The records of one direction between two stages.

    Attributes:
        source_stage: the stage that sent the messages.
        destination_stage: the stage that received them.
        direction: forward (activations) or backward (gradients).
        messages: records with a payload.
        receipts: records of what arrived, with a checksum only.
        tensor_bytes: of the messages, unpacked.
        payload_bytes: of the messages, as they are stored.
    """

    source_stage: int
    destination_stage: int
    direction: Direction
    messages: int
    receipts: int
    tensor_bytes: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """A segment in numbers.

    Attributes:
        path: of the segment, in its folder.
        run_id: the run that wrote it; empty if it cannot be read, and so for all that follows.
        rank: the worker that wrote it.
        generation: in which it was written.
        iterations: the first and the last one with a record in it.
        boundaries: what it holds, by stages and direction.
        damage: one line for each record that is damaged, or one for the segment as a whole.
    """

    path: str
    size_bytes: int
    run_id: str
    rank: int | None
    generation: int | None
    iterations: tuple[int, int] | None
    boundaries: tuple[BoundarySummary, ...]
    damage: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


def inspect_segment(url: str) -> SegmentSummary:
    """Read a segment, and verify all its payloads.

    Args:
        url: the path or URL of the file.

    Raises:
        UsageError: if there is no such file, if it cannot be read, or if it is something else.
    """
    folder, _, name = url.rstrip("/").rpartition("/")
    store = ReadOnlyStore(folder or ".", patience_s=10.0)
    try:
        source = store.open_read(name)
    except Exception as error:
        raise UsageError(
            f"{url} cannot be read ({store.redacted(first_line(error))}): give the path or the URL of a file "
            "like STORE/log/rank-00001/g00002-s000003-i00000020-00000047.arrow"
        ) from error
    size = source.size()
    try:
        identity, records = parse_segment(source, name, None)
    except (LogTornError, LogCorruptError) as error:
        if parse_segment_name(name) is None:  # a damaged one has its name
            raise UsageError(
                f"{url} is no log segment: give the path or the URL of a file like "
                "STORE/log/rank-00001/g00002-s000003-i00000020-00000047.arrow"
            ) from error
        return SegmentSummary(name, size, "", None, None, None, (), (first_line(error),))
    numbers = [record.key.iteration for record in records]
    return SegmentSummary(
        name,
        size,
        identity.run_id,
        identity.rank,
        identity.generation,
        (min(numbers), max(numbers)) if numbers else None,
        tuple(_boundaries(records)),
        tuple(filter(None, map(payload_damage, records))),
    )


def _place(record: Record) -> tuple[int, int, Direction]:
    return record.key.source_stage, record.key.destination_stage, record.key.direction


def _boundaries(records: Iterable[Record]) -> Iterator[BoundarySummary]:
    for place, found in groupby(sorted(records, key=_place), _place):
        own = list(found)
        messages = [record for record in own if record.kind is RecordKind.MESSAGE]
        yield BoundarySummary(
            *place,
            messages=len(messages),
            receipts=len(own) - len(messages),
            tensor_bytes=sum(_tensor_bytes(record) for record in messages),
            payload_bytes=sum(len(record.payload or b"") for record in messages),
        )


def _tensor_bytes(record: Record) -> int:
    return math.prod(record.shape) * int(getattr(torch, record.dtype).itemsize)
