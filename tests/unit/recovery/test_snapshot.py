"""Snapshots: the text of a state, and back."""

from __future__ import annotations

import base64
import json
import zlib

import pytest

from swift_ft.errors import SwiftError
from swift_ft.recovery import events as ev
from swift_ft.recovery.blocks import Sequencer, Stamped
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step
from swift_ft.recovery.snapshot import JournalSnapshot, decoded, encoded, snapshot_from_text, snapshot_to_text
from tests.support.journals import ENDED, RECOVERED, opening


def snapshots(events: list[ev.Event]) -> list[JournalSnapshot]:
    """After each event."""
    found = [JournalSnapshot(State(), Sequencer(), 0)]
    for number, event in enumerate(events, 1):
        state, sequencer, _ = found[-1]
        sequencer, _ = sequencer.admit(Stamped(event, 1.0, "me", f"origin {number % 3}", number))
        found.append(JournalSnapshot(step(state, event), sequencer, number))
    return found


@pytest.mark.parametrize("events", [[*RECOVERED, *ENDED], opening(3, spares=2, replicas=True)])
def test_a_snapshot_comes_back_from_its_text(events: list[ev.Event]) -> None:
    """``tests/simulation`` does so for all states that it sees."""
    for snapshot in snapshots(events):
        assert snapshot_from_text(snapshot_to_text(snapshot)) == snapshot


def test_all_participants_write_the_same_text() -> None:
    """Maps that were filled in another order are equal, and so are their texts."""
    one = snapshots(RECOVERED)[-1]
    assert snapshot_to_text(snapshot_from_text(snapshot_to_text(one))) == snapshot_to_text(one)


def test_what_workers_have_in_common_is_written_once() -> None:
    snapshot = snapshots(opening(500))[-1]
    plain = json.dumps(encoded(JournalSnapshot, snapshot))
    assert plain.count("max_replay_shards") == 1


def test_another_version_is_refused() -> None:
    text = base64.b64encode(zlib.compress(b'{"format": 99, "snapshot": {}}'))
    with pytest.raises(SwiftError, match=r"format 99 and not 1.*same version"):
        snapshot_from_text(text)


def test_a_type_without_a_text_is_named() -> None:
    with pytest.raises(TypeError, match="a snapshot cannot hold <class 'complex'>"):
        encoded(complex, 1j)
    with pytest.raises(TypeError, match="a snapshot cannot hold"):
        decoded(set, [])
