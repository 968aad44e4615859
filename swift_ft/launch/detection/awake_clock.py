"""A watcher's own time: the clock that stands still while its process does, and the gaps between its looks.

A process that was suspended or starved received no heartbeats, so the gap says nothing about its peers. Their
silence is measured in the time during which it could have heard them. A process that is held up on an
overloaded host cannot expect others on this host to be on time either.

The watch over machines counts that time (:class:`AwakeClock`). Those over workers and over the store, which
look now and then, ask whether they were held up since their last look (:class:`Looks`). Pure.
"""

from __future__ import annotations

import math

from swift_ft.config import detection_timings as timings


class AwakeClock:
    """Counts the seconds in which its process ran as it should, from 0.

    Args:
        grace_s: how late a process may be that is not held up.
        now: the monotonic time.
    """

    def __init__(self, grace_s: float, now: float) -> None:
        self._grace_s = grace_s
        self._looked_at = now
        self._awake_s = 0.0

    @property
    def awake_s(self) -> float:
        """The seconds counted up to the last look."""
        return self._awake_s

    def look(self, now: float, pause_s: float) -> float:
        """Count up to now, at once after a wait. What has arrived has to be read before others are judged.

        Args:
            now: the monotonic time.
            pause_s: the longest time that the wait was to take. By as much as it took longer, this process
                was held up: that does not count, and as much again is taken off.
        """
        took_s = now - self._looked_at
        late_s = max(0.0, took_s - pause_s - self._grace_s)
        self._awake_s += max(0.0, took_s - 2 * late_s)
        self._looked_at = now
        return self._awake_s


class Looks:
    """Notes when a process looks at others, and whether it was held up in between.

    Args:
        looked_at: when it looked first, by the monotonic time; without it, the next look is the first one.
    """

    def __init__(self, looked_at: float = math.inf) -> None:
        self._looked_at = looked_at

    def were_apart(self, now: float, silence_s: float) -> bool:
        """Note a look. Whether this process was held up since the last one, and heard nothing meanwhile.

        Args:
            now: the monotonic time.
            silence_s: how long the others may be silent.
        """
        apart_s, self._looked_at = now - self._looked_at, now
        return apart_s > timings.ASLEEP_SHARE * silence_s
