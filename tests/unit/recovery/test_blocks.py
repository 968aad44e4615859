"""Blocks of events: their text, and each event's place in the journal."""

from __future__ import annotations

import json
from typing import get_args, get_origin, get_type_hints

import pytest
from immutables import Map

from swift_ft.errors import SwiftError
from swift_ft.recovery import blocks
from swift_ft.recovery import events as ev
from swift_ft.recovery.blocks import Block, Sequencer, Stamped, block_from_text, block_to_text
from swift_ft.recovery.entries import Entry
from tests.support.journals import RECOVERED


def stamped(event: ev.Event, serial: int, origin: str = "a") -> Stamped:
    return Stamped(event, 1000.0 + serial, f"agent {origin}", origin, serial)


def lost(number: int, origin: str = "a") -> Stamped:
    return stamped(ev.MachineLost(machine=f"m-{number}", reason="silent"), number, origin)


def reports(ranks: int) -> Block:
    return tuple(
        Stamped(
            ev.StatusReported(
                rank=rank, generation=3, iteration=7, live=True, stages=(rank % 8,), holds=("layer",)
            ),
            1000.0 + rank / 1000,
            f"worker {rank}",
            f"origin-{rank}",
            5,
        )
        for rank in range(ranks)
    )


def test_a_block_comes_back_from_its_text() -> None:
    block = tuple(stamped(event, serial) for serial, event in enumerate(RECOVERED, 1))
    assert block_from_text(block_to_text(block)) == block
    for one in block:
        assert block_from_text(block_to_text([one])) == (one,)
    assert block_from_text(block_to_text(reports(100))) == reports(100)


def test_a_block_of_the_same_event_twice_comes_back() -> None:
    block = (lost(1), lost(1))
    assert block_from_text(block_to_text(block)) == block


def test_what_reports_have_in_common_is_written_once() -> None:
    """A phase of many workers is one short text."""
    text = block_to_text(reports(1000))
    assert text.count("layer") == text.count('"generation"') == 1
    (run,) = json.loads(text)
    assert set(run["each"]) == {"rank", "stages", "at", "by", "origin"}


def test_a_default_is_not_written() -> None:
    (run,) = json.loads(block_to_text(reports(2)))
    assert "can_resend" not in run["same"]
    assert "can_resend" not in run["each"]


def test_an_unknown_event_is_named() -> None:
    text = block_to_text([lost(1)]).replace("MachineLost", "MachineSold")
    with pytest.raises(SwiftError, match=r"unknown event 'MachineSold'.*same version"):
        block_from_text(text)


def test_each_event_gets_the_next_position() -> None:
    sequencer = Sequencer()
    sequencer, first = sequencer.admit(lost(1))
    sequencer, second = sequencer.admit(lost(1, "b"))
    assert first == Entry(0, lost(1).event, 1001.0, "agent a")
    assert second == Entry(1, lost(1).event, 1001.0, "agent b")
    assert sequencer == Sequencer(Map({"a": 1, "b": 1}), 2)


def test_an_event_counts_once_however_often_it_is_written() -> None:
    sequencer, _ = Sequencer().admit_all([lost(1), lost(2), lost(1, "b")])
    after, entries = sequencer.admit_all([lost(1), lost(2), lost(3), lost(1, "b"), lost(3)])
    assert [(entry.position, entry.event) for entry in entries] == [(3, lost(3).event)]
    assert after.position == 4
    assert after.admit(lost(2)) == (after, None)
    assert after.has(lost(3))
    assert not after.has(lost(4))


@pytest.mark.parametrize("cut", range(1, 6))
def test_entries_do_not_depend_on_how_events_fall_into_blocks(cut: int) -> None:
    events = [lost(number, origin) for number in range(1, 6) for origin in "ab"]
    whole = Sequencer().admit_all(events)
    sequencer, entries = Sequencer(), []
    for block in (events[at : at + cut] for at in range(0, len(events), cut)):
        sequencer, new = sequencer.admit_all(block)
        entries += new
    assert (sequencer, entries) == whole


def test_a_field_of_an_event_that_is_a_tuple_is_known_by_its_type() -> None:
    """A list in JSON becomes a tuple in these fields, and in no others."""
    for kind, tuples in blocks._TUPLES.items():
        for name, hint in get_type_hints(kind).items():
            assert (get_origin(hint) is tuple) == (name in tuples), (kind, name)
            assert all(get_origin(part) is not tuple for part in get_args(hint)), (kind, name)


@pytest.mark.parametrize("text", ["", "hello", "7", "[1]", '[{"same": 1}]', "{}x", '{"a": 1}'])
def test_what_is_no_block_is_called_so(text: str) -> None:
    """Something else writes where the journal is: that is no store that does not answer."""
    with pytest.raises(SwiftError, match="no block of it"):
        block_from_text(text)
