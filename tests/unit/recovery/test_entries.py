"""Events and entries as JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.errors import SwiftError
from swift_ft.recovery.entries import Entry, entry_from_dict, event_from_dict
from swift_ft.recovery.events import EVENTS, Event


def any_of(kind: type[Event]) -> st.SearchStrategy[Event]:
    """Events of a class, with values in all fields."""
    return st.builds(kind, **{field.name: ... for field in dataclasses.fields(kind)})


EVENT = st.one_of(*map(any_of, EVENTS.values()))


@given(st.builds(Entry, st.integers(0), EVENT, at=st.floats(0, 1e10), by=st.text()))
def test_every_event_survives_the_journal(entry: Entry) -> None:
    assert entry_from_dict(json.loads(json.dumps(entry.to_dict()))) == entry


def test_an_event_of_another_version_is_refused() -> None:
    with pytest.raises(SwiftError, match="same version"):
        event_from_dict({"event": "Teleported", "machine": "A"})
