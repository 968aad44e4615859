"""A sentinel's knowledge of one machine that it watches, and when that machine counts as lost. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

SILENCE_SHARES = (0.95, 0.975, 1.0)
"""By turn: the share of the allowed silence after which a watcher reports. The first one leaves the others
time to read its report, and all are done when the silence has lasted as long as allowed."""

FIRST_CONTACT = 5
"""How many times the allowed silence it may take until a machine can be heard. Both sides compute for that,
and where many connect at once, it takes longer than a heartbeat."""

END_STEP_S = 0.05
"""The delay between two watchers' reports of the end of a connection."""


@dataclass(frozen=True, slots=True)
class LostMachine:
    """A machine that a sentinel lost.

    Attributes:
        machine: its name.
        reason: why, in words.
        silent: it said nothing, though its connection lived. It may only have been frozen.
        known_ns: for how long its end is known by now, in nanoseconds: others report it first.
    """

    machine: str
    reason: str
    silent: bool = False
    known_ns: int = field(default=0, compare=False)


@dataclass(slots=True)
class WatchedMachine:
    """One machine that is watched. Owner: the sentinel's thread. Times are those of its awake clock.

    Attributes:
        machine: its name.
        address: where it is watched.
        turn: 0 for the watcher that reports first; the others do if that one does not.
        heard_at: when it was last heard, or when the first attempt to connect began.
        connected: it can be heard.
        trouble: why it cannot be reached, as far as is known.
        ended: why it can never be heard again; empty while it can.
        ended_at: since when.
        over: it said goodbye, or was reported.
    """

    machine: str
    address: str
    turn: int
    heard_at: float
    connected: bool = False
    trouble: str = "timed out"
    ended: str = ""
    ended_at: float = 0.0
    over: bool = False

    def end(self, reason: str, now: float) -> None:
        """Note that it can never be heard again."""
        if not self.ended:
            self.ended, self.ended_at = reason, now

    def due_at(self, silence_s: float) -> float:
        """When it counts as lost if nothing is heard of it until then."""
        if self.ended:
            return self.ended_at + self.turn * END_STEP_S
        if not self.connected:
            return self.heard_at + silence_s * (FIRST_CONTACT + self.turn / len(SILENCE_SHARES))
        return self.heard_at + silence_s * SILENCE_SHARES[min(self.turn, len(SILENCE_SHARES) - 1)]

    def as_lost(self, now: float) -> LostMachine:
        """The report of it."""
        if self.ended:
            return LostMachine(self.machine, self.ended, known_ns=round((now - self.ended_at) * 1e9))
        if self.connected:
            reason = f"its agent was silent for {now - self.heard_at:.1f} s"
            return LostMachine(self.machine, reason, silent=True)
        return LostMachine(self.machine, f"its agent cannot be reached ({self.trouble})")
