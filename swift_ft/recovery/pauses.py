"""Pauses after which lost machines come again: those lost again and again, or by what only time mends. Pure.

``--join-timeout`` counts from the end of these pauses: whoever was told to stay away is not missing before.
"""

from __future__ import annotations

import math

from swift_ft.recovery.exclusion import machines_left_out
from swift_ft.recovery.guests import guests_wanted
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.membership import Losses, base_of

_KEPT_OUT_S = 10.0
_KEPT_OUT_AT_MOST_S = 300.0
_PUT_OFF_AT_MOST_S = 3600.0
_MOST_DOUBLINGS = 5
"""After these the longest time is reached, however often a machine is lost in a run of weeks."""

Pause = tuple[str, int]
"""The identity of a machine, and how often in a row it was put off: another one has another number."""


def kept_out_s(state: State, machine: str) -> float:
    """The time for which a machine stays away that others have lost sight of, or have lost, again and again.

    One that is reachable in one direction only joins again at once, and is lost again at once. Each time that
    costs all others a recovery. A machine whose workers die may come back at once while it is needed, unless
    they die by what only time mends.
    """
    membership = state.membership
    identity = membership.identity_of(machine)
    if identity in machines_left_out(state):  # what it comes for is to be told so
        return 0.0
    times = _put_off(state, identity)
    if len(membership.members) == state.shape.machines:
        domain = membership.losses.get(identity, Losses(0)).domain
        times = max(times, membership.often_lost(machine, domain) - 1)
    return _pause_s(times)


def guest_put_off_s(state: State, host: str) -> float:
    """The time for which a machine takes no guest, as its last one has failed by what only time mends."""
    return _pause_s(state.tries.attempts.waits_of(state.membership.identity_of(host)))


def pauses_of(state: State) -> dict[Pause, float]:
    """The pauses for which a job with an empty slot waits, in seconds."""
    membership, attempts = state.membership, state.tries.attempts
    if not attempts.waits and not membership.silenced:
        return {}
    there = {membership.identity_of(machine) for machine in (*membership.slots, *membership.spares)}
    away = {*attempts.waits, *membership.silenced} - there
    pauses = {
        (identity, times): _pause_s(times)
        for identity in away
        if (times := _put_off(state, identity)) and not _has_left(state, identity)
    }
    for host in guests_wanted(state):
        identity = membership.identity_of(host)
        pauses[identity, attempts.waits_of(identity)] = guest_put_off_s(state, host)
    return {pause: seconds for pause, seconds in pauses.items() if seconds}


class Returns:
    """When machines that stay away may come again, as one observer sees it.

    It has to see all states, or it counts a pause from the one in which it sees it first. The end of a pause
    counts as long as a slot is empty, also once the machine is there again.
    """

    def __init__(self) -> None:
        self._seen: State | None = None
        self._pauses: dict[Pause, float] = {}
        self._at: dict[str, float] = {}  # and by identity, since a slot is empty
        self._most = math.nan

    def last_at(self, state: State, now: float) -> float:
        """When the last of them may come, which may have passed. Minus infinity if nobody stays away.

        A machine that is lost again and again does not put it off for ever: another one may be gone for good.

        Args:
            state: the job's.
            now: a monotonic time, in seconds.
        """
        if state is not self._seen:
            self._seen = state
            self._pauses = {
                pause: self._pauses.get(pause, now + seconds) for pause, seconds in pauses_of(state).items()
            }
            if state.phase != Phase.FORMING or math.isnan(self._most):
                self._at, self._most = {}, now + _PUT_OFF_AT_MOST_S
            for (identity, _), at in self._pauses.items():
                self._at[identity] = max(at, self._at.get(identity, at))
        return min(max(self._at.values(), default=-math.inf), self._most)

    def machines(self, after: float) -> list[str]:
        """The identities of those that stay away, or stayed, until later than a time."""
        return sorted(identity for identity, at in self._at.items() if at > after)


def _put_off(state: State, identity: str) -> int:
    return max(state.membership.silenced.get(identity, 0), state.tries.attempts.waits_of(identity))


def _has_left(state: State, identity: str) -> bool:
    """Whether a machine was asked to leave, or is left out, and so does not return."""
    membership = state.membership
    if identity in machines_left_out(state):
        return True
    if (bearer := membership.bearers.get(identity)) is not None:
        return bearer in membership.left
    return any(base_of(machine) == identity for machine in membership.left)


def _pause_s(times: int) -> float:
    """The pause after what has happened so often in a row: none at first, then ever longer."""
    doubled_s = _KEPT_OUT_S * 2 ** min(times - 2, _MOST_DOUBLINGS)
    return min(doubled_s, _KEPT_OUT_AT_MOST_S) if times > 1 else 0.0
