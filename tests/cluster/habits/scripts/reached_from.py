"""Functions that a script imports, and the state behind them."""

import functools

calls = 0


def growing() -> int:
    """How often it was called: in a global of this file."""
    global calls
    calls += 1
    return calls


@functools.cache
def tracker() -> dict[str, int]:
    """The same object each time."""
    return {"count": 0}
