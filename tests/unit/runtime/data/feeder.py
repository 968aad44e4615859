"""Another file of a program, with an iterator in a variable of its own."""

from __future__ import annotations

import itertools

held = itertools.cycle([1])


def batch() -> int:
    """The next one."""
    return next(held)
