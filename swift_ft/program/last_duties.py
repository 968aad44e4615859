"""The duties between the end of a script that has succeeded and the end of its process."""

from __future__ import annotations

from collections.abc import Callable

_duties: list[Callable[[], None]] = []
"""In the order in which they are done. Owner: the script's thread."""


def add(duty: Callable[[], None]) -> None:
    """Have something done after the script's last line, if its exit code is 0."""
    _duties.append(duty)


def remove(duty: Callable[[], None]) -> None:
    """It is done, or not due any more."""
    if duty in _duties:
        _duties.remove(duty)


def do_all() -> None:
    """Do what is due, each once."""
    while _duties:
        _duties.pop(0)()
