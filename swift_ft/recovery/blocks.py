"""Blocks: events as they travel to the journal, several at a time, each with its origin's stamp. Pure.

What is written to the store at once is a block. A process numbers the events that it appends, and they are
passed on in this order. The same event may be written twice: a head died after it had written
and before it answered, or was frozen and woke up. All readers count the first one and drop the others
(:class:`Sequencer`).

The text of a block holds once what its events have in common: reports of one phase differ in few fields.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from immutables import Map

from swift_ft.errors import SwiftError
from swift_ft.recovery.entries import Entry, event_class
from swift_ft.recovery.events import EVENTS, Event
from swift_ft.recovery.values import made


class Stamped(NamedTuple):
    """An event on its way to the journal.

    Attributes:
        event: what happened.
        at: Unix time in seconds, by the clock of the origin.
        by: the participant that appended it, in words.
        origin: the process that appended it, unlike any other.
        serial: its number among the events of its origin, from 1.
    """

    event: Event
    at: float
    by: str
    origin: str
    serial: int


Block = tuple[Stamped, ...]


@dataclass(frozen=True, slots=True)
class Sequencer:
    """Gives each event its position in the journal, and finds those that were there before.

    Attributes:
        heard: by origin, the serial of its last event.
        position: where the next event stands.
    """

    heard: Map[str, int] = field(default_factory=Map)
    position: int = 0

    def has(self, stamped: Stamped) -> bool:
        """Whether an event, or a later one of its origin, is in the journal."""
        return stamped.serial <= self.heard.get(stamped.origin, 0)

    def admit(self, stamped: Stamped) -> tuple[Sequencer, Entry | None]:
        """The next event: its entry, or None if it is there already."""
        after, entries = self.admit_all((stamped,))
        return after, entries[0] if entries else None

    def admit_all(self, block: Iterable[Stamped]) -> tuple[Sequencer, list[Entry]]:
        """The entries of a block, without the events that are there already."""
        entries: list[Entry] = []
        position = self.position
        heard = self.heard.mutate()
        for event, at, by, origin, serial in block:
            if serial <= heard.get(origin, 0):
                continue
            heard[origin] = serial
            entries.append(Entry(position, event, at, by))
            position += 1
        return (Sequencer(heard.finish(), position), entries) if entries else (self, entries)


# ------------------------------------------------------------------------------------------------- the text

_STAMP = ("at", "by", "origin", "serial")


def block_to_text(block: Sequence[Stamped]) -> str:
    """A block as compact JSON: a list of runs, each of neighbouring events of one kind.

    ``same`` holds what is equal in all events of a run, ``each`` has a list for what differs. What has its
    default in all of them is left out.
    """
    runs = [_run(list(run)) for _, run in itertools.groupby(block, key=lambda stamped: type(stamped.event))]
    return json.dumps(runs, separators=(",", ":"))


def block_from_text(text: str | bytes) -> Block:
    """The inverse of :func:`block_to_text`.

    Raises:
        SwiftError: for an event that this version does not know, and for a text that is not a block.
    """
    try:
        return tuple(itertools.chain.from_iterable(_stamped(run) for run in json.loads(text)))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, SwiftError):
            raise
        raise SwiftError(
            f"What the rendezvous store holds in the journal's place is no block of it ({text[:40]!r}): "
            "another program or version writes there. Give the run a store or an --rdzv-id of its own, and "
            "go on from the last checkpoint with --resume."
        ) from error


def _run(block: list[Stamped]) -> dict[str, Any]:
    kind = type(block[0].event)
    same: dict[str, Any] = {}
    each: dict[str, list[Any]] = {}
    events = [stamped.event for stamped in block]
    for name, default in _FIELDS[kind]:
        values = [getattr(event, name) for event in events]
        if values.count(values[0]) < len(values):
            each[name] = values
        elif values[0] != default:
            same[name] = values[0]
    for name, stamps in zip(_STAMP, list(zip(*block, strict=True))[1:], strict=True):
        if stamps.count(stamps[0]) < len(stamps):
            each[name] = list(stamps)
        else:
            same[name] = stamps[0]
    run: dict[str, Any] = {"event": kind.__name__, "same": same}
    return run | {"count": len(block), "each": each} if len(block) > 1 else run


def _stamped(run: dict[str, Any]) -> Iterator[Stamped]:
    kind = event_class(run["event"])
    same: dict[str, Any] = run["same"]
    each: dict[str, list[Any]] = run.get("each", {})
    count: int = run.get("count", 1)
    tuples = _TUPLES[kind]
    columns: dict[str, Iterable[Any]] = {
        name: itertools.repeat(tuple(value) if name in tuples else value, count)
        for name, value in same.items()
    }
    columns |= {name: map(tuple, values) if name in tuples else values for name, values in each.items()}
    stamps = [columns[name] for name in _STAMP]
    return map(Stamped._make, zip(made(kind, count, columns), *stamps, strict=True))


_REQUIRED = object()


def _fields_of(kind: type[Event]) -> tuple[tuple[str, Any], ...]:
    found = dataclasses.fields(kind)
    return tuple((f.name, _REQUIRED if f.default is dataclasses.MISSING else f.default) for f in found)


_FIELDS: dict[type[Any], tuple[tuple[str, Any], ...]] = {kind: _fields_of(kind) for kind in EVENTS.values()}
"""Names and defaults of each event's fields."""

_TUPLES: dict[type[Any], frozenset[str]] = {
    kind: frozenset(f.name for f in dataclasses.fields(kind) if str(f.type).startswith("tuple["))
    for kind in EVENTS.values()
}
"""By kind of event, the fields that are tuples, which JSON makes lists. No other field has a list."""
