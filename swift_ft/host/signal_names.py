"""Signals in words, and in the exit codes of processes. Pure."""

from __future__ import annotations

import signal

_OF_SHELLS = 128
"""A shell ends with this and the signal's number if a signal has ended the command that it ran last."""


def signal_name(number: int) -> str:
    """A name such as ``SIGKILL``. Python knows no names for most of the real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_in(code: int) -> int:
    """The signal that an exit code tells of, by its sign or as shells do; 0 if it tells of none."""
    number = -code if code < 0 else code - _OF_SHELLS
    return number if code < 0 or number in signal.valid_signals() else 0
