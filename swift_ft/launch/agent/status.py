"""An agent's view of itself and its job, for metrics and probes."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swift_ft.recovery.entries import Entry
from swift_ft.recovery.history import History
from swift_ft.recovery.job_state import Phase
from swift_ft.recovery.snapshot import JournalSnapshot


@dataclass(frozen=True, slots=True)
class JobFacts:
    """The job, as its journal tells it.

    Attributes:
        generation: number of the current membership.
        slots: machines that the job needs.
        members: machines that fill a slot.
        spares: machines that wait for one.
        failures: machines with workers that were lost.
        recoveries: number of recoveries that have ended, by way.
        lost_seconds: from each loss to live training, together; a recovery that goes on counts up to now.
        checkpoint: iteration of the last committed checkpoint; None before the first.
        checkpoint_age_seconds: since its commit, by the clock of who committed it; None before the first.
    """

    generation: int
    phase: Phase
    slots: int
    members: int
    spares: int
    failures: int
    recoveries: Mapping[str, int]
    lost_seconds: float
    checkpoint: int | None
    checkpoint_age_seconds: float | None


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """An agent's knowledge of one of its workers.

    Attributes:
        rank: the worker.
        heartbeat_age_seconds: since its last message.
        beat: the facts of its last heartbeat.
    """

    rank: int
    heartbeat_age_seconds: float
    beat: Mapping[str, Any] = field(default_factory=dict)


class AgentStatus:
    """Keeps what the agent's threads note, and answers those that serve it.

    Args:
        loop_limit_s: the agent's loop is stuck if it has not turned for so long.
    """

    def __init__(self, *, loop_limit_s: float) -> None:
        self._loop_limit_s = loop_limit_s
        self._lock = threading.Lock()
        self._history = History()  # guarded by the lock
        # Owner: the agent's thread. Others read.
        self._store_silent_s: Callable[[], float] = float
        self._store_limit_s = math.inf
        self._turned_at: float | None = None
        self._workers: Callable[[], list[WorkerFacts]] = list

    def on_entries(self, entries: Sequence[Entry]) -> None:
        """Apply entries of the journal. Called in the follower's thread."""
        with self._lock:
            for entry in entries:
                self._history.apply(entry)

    def on_snapshot(self, snapshot: JournalSnapshot) -> None:
        """Begin from a snapshot of the journal. Called in the follower's thread."""
        with self._lock:
            self._history.begin(snapshot.state)

    def observe_store(self, silence_s: Callable[[], float], limit_s: float) -> None:
        """From now on, ask how long the rendezvous store has not answered.

        Args:
            silence_s: tells it.
            limit_s: from then on the store counts as out of reach.
        """
        self._store_silent_s, self._store_limit_s = silence_s, limit_s

    def store_silent_s(self) -> float:
        """Seconds since the rendezvous store answered."""
        return self._store_silent_s()

    def turn(self, workers: Callable[[], list[WorkerFacts]]) -> None:
        """The agent's loop turns, and is about to look at what happened.

        Args:
            workers: tells what was heard of them. Called by other threads.
        """
        self._turned_at = time.monotonic()
        self._workers = workers

    def workers(self) -> list[WorkerFacts]:
        """The running workers of this machine, by rank."""
        return self._workers()

    def job(self) -> JobFacts:
        """The job as far as this agent has read the journal."""
        with self._lock:
            history, state, now = self._history, self._history.state, time.time()
            committed_at = history.committed_at
            ended = (recovery.mode for recovery in history.recoveries if recovery.live is not None)
            return JobFacts(
                state.generation,
                state.phase,
                state.shape.machines,
                len(state.membership.members),
                len(state.membership.spares),
                history.failures,
                Counter(ended),
                history.lost_seconds(now),
                state.checkpoints.committed,
                None if committed_at is None else max(0.0, now - committed_at),
            )

    def trouble(self) -> str:
        """Why this agent is not healthy, in one line; empty if it is.

        A machine that has not joined yet, such as a spare before the job starts, has no loop.
        """
        silent_s = self.store_silent_s()
        if silent_s > self._store_limit_s:
            return f"the rendezvous store has not answered for {silent_s:.0f} s"
        stuck_s = time.monotonic() - self._turned_at if self._turned_at is not None else 0.0
        if stuck_s > self._loop_limit_s:
            return f"the agent's loop has not turned for {stuck_s:.0f} s"
        return ""
