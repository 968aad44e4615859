"""The current line of the user's own script, however deep in libraries it has called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from traceback import StackSummary
from types import FrameType

from swift_ft.program.own_code import is_own_file


def script_line() -> str:
    """The line that the calling thread has reached: ``train.py:31 (main)``, for example."""
    own = next(filter(_is_users, frames_of(sys._getframe())), None)
    return _line(own) if own is not None else "the script"


def line_in(stack: StackSummary) -> str:
    """As :func:`script_line`, at an earlier moment.

    Args:
        stack: what was called then, the innermost frame last.
    """
    own = next((frame for frame in reversed(stack) if is_own_file(frame.filename)), None)
    if own is None:
        return "the script"
    return f"{Path(own.filename).name}:{own.lineno} ({own.name})"


def frames_of(frame: FrameType | None) -> Iterator[FrameType]:
    """From the innermost outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def place_of(frame: FrameType) -> str:
    """The innermost line of the user's own code, and the function of a library that it called."""
    called = ""
    for f in frames_of(frame):
        if _is_users(f):
            return f"at {_line(f)}" + (f", in {called}" if called else "")
        called = called or f"{f.f_globals.get('__name__', '?')}.{f.f_code.co_name}"
    return f"in {called}"


def lines_of(frame: FrameType) -> Iterator[str]:
    """The lines that led to a frame, the innermost first, without those of this package."""
    return (_line(f) for f in frames_of(frame) if not f.f_globals.get("__name__", "").startswith("swift_ft."))


def _is_users(frame: FrameType) -> bool:
    return is_own_file(frame.f_code.co_filename)


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
