"""Workers that were stopped by a signal, as the kernel says of them.

A worker that holds its interpreter for long is silent and computes. One that is stopped (SIGSTOP, Ctrl-Z)
does nothing and is found sooner. A debugger's stop is another one, and is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from swift_ft.launch.processes.context import process_state

LOOKS = 10
"""How often one looks, in the time for which a worker may be stopped, as long as one is."""

_BY_SIGNAL = "T"


class StoppedWorkers:
    """Says which workers of one machine have been stopped for too long. Owner: the agent's main thread.

    Args:
        clock: monotonic.
        state_of: the kernel's letter for a process's state.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        state_of: Callable[[int], str] = process_state,
    ) -> None:
        self._clock = clock
        self._state_of = state_of
        self._since: dict[int, float] = {}  # by pid, when it was first seen stopped
        self._looked_at = -float("inf")
        self._told = False

    @property
    def some(self) -> bool:
        """Whether one was stopped at the last look: the next one has to come soon."""
        return bool(self._since)

    def tell(self) -> None:
        """A signal has stopped some worker: the next look is not put off."""
        self._told = True

    def look(self, pids: Mapping[int, int], ages: Mapping[int, float], limit_s: float) -> list[int]:
        """Look at all workers, unless that was done just now.

        Args:
            pids: by local rank.
            ages: seconds since each was last heard, by local rank. Others are not looked at.
            limit_s: how long a worker may be stopped.

        Returns:
            Local ranks of those that have been stopped for so long, at the latest.
        """
        now, between_s = self._clock(), limit_s / LOOKS
        if now - self._looked_at < between_s / 2 and not self._told:
            return []
        self._told = False
        if now - self._looked_at > limit_s / 2:  # this process was held up, and they may have run meanwhile
            self._since.clear()
        self._looked_at = now
        stopped = {
            local_rank: pid
            for local_rank, pid in pids.items()
            if local_rank in ages and self._state_of(pid) == _BY_SIGNAL
        }
        self._since = {pid: self._since.get(pid, now) for pid in stopped.values()}
        return [
            local_rank
            for local_rank, pid in stopped.items()
            if min(now - self._since[pid], ages[local_rank]) > limit_s - 2 * between_s
        ]
