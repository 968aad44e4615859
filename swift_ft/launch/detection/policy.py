"""The policy of detection: what counts as gone, by what was heard of it and when. Pure.

No socket, no thread and no clock: the caller says what time it is. A machine is judged by each of its
watchers (:class:`WatchedMachine`); a worker by its agent, which hears its heartbeats (:class:`Heartbeats`)
and asks the kernel for its state (:class:`StoppedWorkers`); the rendezvous store by each machine
(:class:`StoreSilence`). All numbers are in `config/detection_timings.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from swift_ft.config import detection_timings as timings
from swift_ft.launch.detection.awake_clock import Looks

# --------------------------------------------------------------------------------------------------- machines


@dataclass(frozen=True, slots=True)
class LostMachine:
    """A machine that a sentinel lost.

    Attributes:
        machine: its name.
        reason: why, in words.
        silent: it said nothing, though its connection lived. It may only have been frozen.
        deaf: the watcher has heard none of the others since, up to the report. Its own link may be at fault.
        known_ns: for how long its end is known by now, in nanoseconds: others report it first.
        recorded: by local rank, the iterations before which its workers have given their records.
    """

    machine: str
    reason: str
    silent: bool = False
    deaf: bool = False
    known_ns: int = field(default=0, compare=False)
    recorded: tuple[int, ...] = ()


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
        put_off: it fell silent with all others, and has one more silence.
        over: it said goodbye, or was reported.
        recorded: see :class:`LostMachine`.
    """

    machine: str
    address: str
    turn: int
    heard_at: float
    connected: bool = False
    trouble: str = "timed out"
    ended: str = ""
    ended_at: float = 0.0
    put_off: bool = False
    over: bool = False
    recorded: tuple[int, ...] = ()

    def hear(self, at: float) -> None:
        """Note that it was heard."""
        self.heard_at, self.put_off = at, False

    def end(self, reason: str, now: float) -> None:
        """Note that it can never be heard again."""
        if not self.ended:
            self.ended, self.ended_at = reason, now

    def due_at(self, silence_s: float) -> float:
        """When it counts as lost if nothing is heard of it until then."""
        if self.ended:
            return self.ended_at + self.turn * timings.END_STEP_S
        shares = timings.SILENCE_SHARES
        silences = shares[min(self.turn, len(shares) - 1)]
        if not self.connected:
            silences = timings.FIRST_CONTACT + self.turn / len(shares)
        return self.heard_at + silence_s * (silences + self.put_off)

    def as_lost(self, now: float, *, deaf: bool = False) -> LostMachine:
        """The report of it.

        Args:
            now: the time.
            deaf: see :class:`LostMachine`; without a meaning for one that has ended.
        """
        if self.ended:
            known_ns = round((now - self.ended_at) * 1e9)
            return LostMachine(self.machine, self.ended, known_ns=known_ns, recorded=self.recorded)
        if self.connected:
            reason = f"its agent was silent for {now - self.heard_at:.1f} s"
            return LostMachine(self.machine, reason, silent=True, deaf=deaf, recorded=self.recorded)
        reason = f"its agent cannot be reached ({self.trouble})"
        return LostMachine(self.machine, reason, deaf=deaf, recorded=self.recorded)


def silent_with(
    silent: WatchedMachine, watched: Collection[WatchedMachine], within_s: float
) -> list[WatchedMachine]:
    """The machines that fell silent at once with one that did, if a watcher hears no other one; else none.

    That looks the same to it whether they are gone or its own link is. A machine that was silent before says
    nothing about that link, nor one that has yet to be reached, unless none was.

    Args:
        silent: the machine.
        watched: all that the watcher watches.
        within_s: how far apart "at once" may be.
    """
    if hears_another(silent, watched, within_s):
        return []
    return [
        one
        for one in watched
        if one is not silent
        and not one.ended
        and (one.connected or not silent.connected)
        and abs(one.heard_at - silent.heard_at) <= within_s
    ]


def hears_another(silent: WatchedMachine, watched: Iterable[WatchedMachine], within_s: float) -> bool:
    """Whether a watcher has heard of another machine since one fell silent: its own link lives.

    Args:
        silent: the machine.
        watched: all that the watcher watches.
        within_s: how far apart "at once" may be.
    """
    reached = (one for one in watched if one is not silent and (one.connected or one.ended))
    signs = (one.ended_at if one.ended else one.heard_at for one in reached)
    return any(at > silent.heard_at + within_s for at in signs)


# ---------------------------------------------------------------------------------------------------- workers


class Heartbeats:
    """When each worker of a machine was heard last. All times are monotonic, all keys are local ranks.

    Owner: the agent's main thread. Threads that serve metrics read :meth:`ages`.
    """

    def __init__(self) -> None:
        self._heard_at: dict[int, float] = {}  # workers that still run
        self._looks = Looks()

    def hear(self, local_rank: int, now: float) -> None:
        """A worker has started, or sent something."""
        self._heard_at[local_rank] = now

    def forget(self, local_rank: int) -> None:
        """Expect nothing of a worker any more."""
        self._heard_at.pop(local_rank, None)

    def forget_all(self) -> None:
        """Expect nothing of any worker any more."""
        self._heard_at.clear()

    def ages(self, now: float) -> dict[int, float]:
        """Seconds since each worker was heard last."""
        return {local_rank: now - heard_at for local_rank, heard_at in list(self._heard_at.items())}

    def silent(self, now: float, silence_s: float) -> list[int]:
        """The workers that are silent for longer. Call it more often than that, again and again."""
        if self._looks.were_apart(now, silence_s):  # they sent heartbeats, and nobody read them
            self._heard_at = dict.fromkeys(self._heard_at, now)
        return [rank for rank, heard_at in self._heard_at.items() if now - heard_at > silence_s]


class StoppedWorkers:
    """Says which workers of a machine have been stopped by a signal for too long.

    A worker that holds its interpreter for long is silent and computes. One that is stopped (SIGSTOP, Ctrl-Z)
    does nothing and is found sooner. All times are monotonic.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # by pid, when it was first seen stopped
        self._looks = Looks()
        self._due_at = -math.inf

    @property
    def some(self) -> bool:
        """Whether one was stopped at the last look: the next one has to come soon."""
        return bool(self._since)

    def tell(self) -> None:
        """A signal has stopped some worker: the next look is not put off."""
        self._due_at = -math.inf

    def is_due(self, now: float) -> bool:
        """Whether to look at the processes again. Not if that was done just now."""
        return now >= self._due_at

    def look(
        self, now: float, stopped: Mapping[int, int], ages: Mapping[int, float], limit_s: float
    ) -> list[int]:
        """Note which workers are stopped.

        Args:
            now: the time.
            stopped: pids of those that the kernel calls stopped now, by local rank.
            ages: seconds since each of them was heard last, by local rank.
            limit_s: how long a worker may be stopped.

        Returns:
            Local ranks of those that reach the limit within two more looks.
        """
        between_s = limit_s / timings.STOPPED_LOOKS
        self._due_at = now + between_s / 2
        if self._looks.were_apart(now, limit_s):  # they may have run meanwhile
            self._since.clear()
        self._since = {pid: self._since.get(pid, now) for pid in stopped.values()}
        return [
            local_rank
            for local_rank, pid in stopped.items()
            if min(now - self._since[pid], ages[local_rank]) > limit_s - 2 * between_s
        ]


# --------------------------------------------------------------------------------------- the rendezvous store


class StoreNews(Enum):
    """News of the store that are worth a line."""

    SILENT = "silent"
    ANSWERS = "answers"


class StoreSilence:
    """Says when the store's silence is worth a line: at first, whenever it has doubled, and at its end.

    Owner: the thread that looks; another one says that it has :meth:`answered`.

    Args:
        notice_s: seconds of silence until the first line.
        now: the monotonic time.
    """

    def __init__(self, notice_s: float, now: float) -> None:
        self._notice_s = notice_s
        self._heard_at = now
        self._looks = Looks(now)
        self._told_next_s = notice_s

    def answered(self, now: float) -> None:
        """The store has answered."""
        self._heard_at = now

    def silence_s(self, now: float) -> float:
        """Seconds since the store answered."""
        return now - self._heard_at

    def look(self, now: float) -> StoreNews | None:
        """Judge the store; None if nothing is worth a line."""
        if self._looks.were_apart(now, self._notice_s):
            self._heard_at = now  # this process was frozen, not the store
        silence_s = self.silence_s(now)
        if silence_s > self._told_next_s:
            self._told_next_s = 2 * silence_s
            return StoreNews.SILENT
        if self._told_next_s > self._notice_s > silence_s:
            self._told_next_s = self._notice_s
            return StoreNews.ANSWERS
        return None
