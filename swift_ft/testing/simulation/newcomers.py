"""Newcomers that begin from a snapshot in the middle of a simulated job, and must come to the same states."""

from __future__ import annotations

import random
from collections import Counter

from swift_ft.recovery import events as ev
from swift_ft.recovery.blocks import Sequencer
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step
from swift_ft.recovery.snapshot import Snapshot, snapshot_from_text, snapshot_to_text
from swift_ft.testing.simulation.store import Violation

_RATE = 0.02
_FOLLOWS = 25
"""Events that a newcomer follows."""


class Newcomers:
    """One newcomer after the other reads a snapshot, and follows the journal for a while.

    Args:
        seen: how often each kind of thing happened.
    """

    def __init__(self, seed: int, seen: Counter[str]) -> None:
        self._rng = random.Random(f"newcomers {seed}")
        self._seen = seen
        self._rate = 0.0
        self._state: State | None = None
        self._left = 0

    def use(self) -> None:
        """Let newcomers come from now on."""
        self._rate = _RATE

    def check(self, before: State, event: ev.Event, after: State) -> None:
        """Compare a newcomer's state with that of all others.

        Raises:
            Violation: if a snapshot is not what it was made of, or leads to another state.
        """
        if self._state is None:
            if self._rng.random() >= self._rate:
                return
            made = Snapshot(before, Sequencer(), 0)
            self._state, self._left = snapshot_from_text(snapshot_to_text(made)).state, _FOLLOWS
            if self._state != before:
                raise Violation(f"a snapshot is not what it was made of: {self._state} and {before}")
            self._seen[f"a newcomer while {before.phase}"] += 1
        self._state, self._left = step(self._state, event), self._left - 1
        if self._state != after:
            raise Violation(f"a newcomer's state differs after {event}: {self._state} and {after}")
        if not self._left:
            self._state = None
