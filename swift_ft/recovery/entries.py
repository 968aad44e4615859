"""The journal's entries: events at their positions, and both as JSON. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swift_ft.errors import SwiftError
from swift_ft.recovery.events import EVENTS, Event


@dataclass(frozen=True, slots=True)
class Entry:
    """One event at its position in the journal.

    Attributes:
        position: 0 for the first.
        event: what happened.
        at: Unix time in seconds, by the writer's clock.
        by: the participant that wrote it.
    """

    position: int
    event: Event
    at: float
    by: str

    def to_dict(self) -> dict[str, object]:
        """A JSON-ready dictionary."""
        return {"position": self.position, "at": self.at, "by": self.by, **event_to_dict(self.event)}


def entry_from_dict(data: dict[str, Any]) -> Entry:
    """The inverse of :meth:`Entry.to_dict`, also after a passage through JSON.

    Raises:
        SwiftError: for an event that this version does not know.
    """
    return Entry(data["position"], event_from_dict(data), data["at"], data["by"])


def event_to_dict(event: Event) -> dict[str, Any]:
    """An event as a JSON-ready dictionary; ``event`` holds its name."""
    return {"event": type(event).__name__, **dataclasses.asdict(event)}


def event_from_dict(data: dict[str, Any]) -> Event:
    """The inverse of :func:`event_to_dict`; unknown keys (time, origin) are left to the caller.

    Raises:
        SwiftError: for an event that this version does not know.
    """
    cls = event_class(data["event"])
    fields = {f.name for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in fields
    }
    make: Callable[..., Event] = cls
    return make(**values)


def event_class(name: str) -> type[Event]:
    """The class of an event.

    Raises:
        SwiftError: for an event that this version does not know.
    """
    cls = EVENTS.get(name)
    if cls is None:
        raise SwiftError(
            f"The journal holds the unknown event {name!r}: "
            "all machines of a job must run the same version of swift_ft."
        )
    return cls
