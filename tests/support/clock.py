"""A clock for what takes one as an argument."""

from __future__ import annotations


class Clock:
    """Stands still until a test moves it.

    Attributes:
        now: the time that it shows, in seconds.
    """

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """The time that it shows."""
        return self.now
