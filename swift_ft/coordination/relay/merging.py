"""The moment at which a relay passes on its events: as soon as waiting for more of them gains nothing.

A phase ends with the last event that it expects, so a relay may keep the events of its machines until it
has all that the phase still expects from them: no one waits for one of them alone. It waits no longer than
a linger, since a machine whose report is held looks late to all others. An urgent event takes along what is
held.

In a large job that forms for the first time joins are held in the same way, until all machines are there:
no one is in a hurry for one of them. Each was a block of its own, which woke all that had joined before.

Machines that are lost together are found by many others at about the same time. In a large job the last relay
on the way waits a few hundredths of a second for more losses: each block ends what all participants do.

While events keep coming the linger starts again with each, up to a bound from the first that is held: each
block wakes all participants of a job, so one block less is worth a wait. A first version had a linger of five
milliseconds, and wrote a block for nearly each worker, since survivors of a loss report within tens of
milliseconds. The second one measured it from the first event, and wrote the more blocks the larger the job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from swift_ft.recovery import events as ev
from swift_ft.recovery.awaited import Told, awaited, is_known, joins_awaited, told
from swift_ft.recovery.blocks import Block, Stamped
from swift_ft.recovery.heads import FANOUT, levels_of
from swift_ft.recovery.job_state import State

LINGER_S = 0.1
"""The time for which events of a phase, and joins of a job that forms, are held after the newest one came."""
LONGEST_LINGER_S = 0.4
"""The longest time for which they are held."""
LOSSES_LINGER_S = 0.02
"""The time for which a loss is held after the newest one, by the relay that goes to the store."""
LONGEST_LOSSES_LINGER_S = 0.1
"""The longest of these: a machine's third watcher reports so late (`launch/detection/policy.py`)."""
PARTS_LINGER_S = 0.5
"""The time for which parts of a checkpoint are held: nothing waits for its commit."""


class Merging:
    """The events that a relay holds, and the moment to pass them on. The relay's lock guards it.

    Args:
        now: a monotonic clock, in seconds.
        fanout: see :data:`swift_ft.recovery.heads.FANOUT`.
    """

    def __init__(self, now: Callable[[], float], fanout: int = FANOUT) -> None:
        self._now = now
        self._fanout = fanout
        self._held: dict[tuple[str, int], Stamped] = {}
        self._due_at = math.inf
        self._latest = math.inf  # what is held is due then, whatever comes
        self._joins = 0  # how many of it are held
        self._ranks: dict[Told, set[int]] = {}  # what else of it is held
        self._missing: dict[Told, set[int]] = {}  # and what is still to come, in the state of the last look
        self._looked_at: tuple[State, range] | None = None

    def hold(self, state: State, events: Iterable[Stamped], *, is_last: bool = False) -> None:
        """Keep events until they are due.

        Args:
            events: that came.
            is_last: this relay goes to the store itself.
        """
        for stamped in events:
            self._held[stamped.origin, stamped.serial] = stamped
            if (what := told(stamped.event)) is not None:
                self._hold_told(*what)
            elif self._is_one_of_many(state, stamped.event):
                self._joins += 1
                self._wait_for_more(LINGER_S, LONGEST_LINGER_S)
            elif is_known(state, stamped.event):
                self._wait_for_more(LINGER_S, LONGEST_LINGER_S)
            elif is_last and isinstance(stamped.event, ev.MachineLost) and self._has_heads(state):
                self._wait_for_more(LOSSES_LINGER_S, LONGEST_LOSSES_LINGER_S)
            else:
                self._due_at = -math.inf

    def _hold_told(self, what: Told, rank: int) -> None:
        self._ranks.setdefault(what, set()).add(rank)
        if (missing := self._missing.get(what)) is not None:
            missing.discard(rank)
        if what.kind is ev.PartPersisted:
            self._wait_for_more(PARTS_LINGER_S, PARTS_LINGER_S)
        else:
            self._wait_for_more(LINGER_S, LONGEST_LINGER_S)

    def _is_one_of_many(self, state: State, event: ev.Event) -> bool:
        """Whether an event is a join that others are still to follow, in a job that has heads."""
        if not isinstance(event, ev.MachineJoined) or not self._has_heads(state):
            return False
        return joins_awaited(state) > 1

    def _has_heads(self, state: State) -> bool:
        return levels_of(state.shape.machines, self._fanout) > 0

    def _wait_for_more(self, linger_s: float, longest_s: float) -> None:
        self._latest = min(self._latest, self._now() + longest_s)
        if self._due_at > -math.inf:
            self._due_at = min(self._latest, self._now() + linger_s)

    def due_at(self, state: State, slots: range) -> float:
        """When to pass on what is held, on the clock: infinite if nothing is.

        Args:
            slots: of the machines whose events come through this relay.
        """
        if self._due_at > self._now() and self._held and self._is_complete(state, slots):
            self._due_at = -math.inf
        return self._due_at

    def _is_complete(self, state: State, slots: range) -> bool:
        if self._looked_at is None or self._looked_at[0] is not state or self._looked_at[1] != slots:
            self._looked_at = state, slots
            self._missing = {}
        for what, ranks in self._ranks.items():
            if what not in self._missing:
                self._missing[what] = awaited(state, what, slots) - ranks
        if self._joins and self._joins >= joins_awaited(state):
            return True
        return bool(self._ranks) and not any(self._missing.values())

    def take(self) -> Block:
        """All that is held, in the order in which it came. Nothing is held then."""
        held = tuple(self._held.values())
        self._held = {}
        self._ranks, self._missing, self._looked_at, self._joins = {}, {}, None, 0
        self._due_at = self._latest = math.inf
        return held

    def __contains__(self, stamped: Stamped) -> bool:
        """Whether this very event is held."""
        return (stamped.origin, stamped.serial) in self._held
