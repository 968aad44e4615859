"""Functions that a script imports, and the state behind them."""

import functools

from tests.cluster.habits.scripts import reached_further
from tests.cluster.habits.scripts.reached_further import growing as growing_further

__all__ = ["Shared", "growing", "growing_further", "reached_further", "tracker"]

calls = 0


class Shared:
    """All that is to be had from everywhere, as some scripts have it."""

    count = 0


def growing() -> int:
    """How often it was called: in a global of this file."""
    global calls
    calls += 1
    return calls


@functools.cache
def tracker() -> dict[str, int]:
    """The same object each time."""
    return {"count": 0}
