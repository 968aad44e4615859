"""A clock that stands still while its process does.

Who was frozen, or was given no processor, has heard nothing meanwhile: that says nothing of the others. So
the silence of others is measured in the time during which one could have heard them.
"""

from __future__ import annotations

__all__ = ["AwakeClock"]


class AwakeClock:
    """Counts the seconds in which its process ran, from 0.

    Args:
        longest_s: the process is said to look at least so often. What a look comes later than this does not
            count.
        now: the monotonic time.
    """

    def __init__(self, longest_s: float, now: float) -> None:
        self._longest_s = longest_s
        self._looked_at = now
        self._awake_s = 0.0

    @property
    def awake_s(self) -> float:
        """The seconds counted up to the last look."""
        return self._awake_s

    def look(self, now: float) -> float:
        """Count up to now. Whatever has arrived meanwhile has to be read before others are judged."""
        self._awake_s += min(now - self._looked_at, self._longest_s)
        self._looked_at = now
        return self._awake_s
