"""Frozen values made quickly are those that Python makes."""

from __future__ import annotations

import dataclasses

import pytest

from swift_ft.recovery import events as ev
from swift_ft.recovery.events import EVENTS
from swift_ft.recovery.job_state import State
from swift_ft.recovery.membership import Membership
from swift_ft.recovery.values import made, replace


def test_a_replaced_field() -> None:
    state = State()
    assert replace(state, generation=3) == dataclasses.replace(state, generation=3)
    assert replace(state, membership=replace(state.membership, arrivals=2)) == dataclasses.replace(
        state, membership=Membership(arrivals=2)
    )
    with pytest.raises(KeyError):
        replace(state, fase=1)


def test_many_values_by_field() -> None:
    values = made(ev.WorkerReady, 3, {"rank": [5, 6, 7], "generation": [1, 1, 1], "received": [0, 9, 0]})
    assert values == [
        ev.WorkerReady(rank=5, generation=1),
        ev.WorkerReady(rank=6, generation=1, received=9),
        ev.WorkerReady(rank=7, generation=1),
    ]
    assert made(ev.WorkerReady, 0, {"rank": [], "generation": []}) == []


def test_a_field_that_is_needed_is_not_left_out() -> None:
    with pytest.raises(TypeError, match="WorkerReady needs generation"):
        made(ev.WorkerReady, 1, {"rank": [5]})


def test_no_event_does_anything_when_it_is_made() -> None:
    """Its constructor is not called."""
    for kind in EVENTS.values():
        assert not hasattr(kind, "__post_init__")
        assert not [f for f in dataclasses.fields(kind) if f.default_factory is not dataclasses.MISSING]
