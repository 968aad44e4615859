"""The current line of the user's own script, however deep in libraries it has called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from traceback import StackSummary
from types import FrameType

from swift_ft.program.own_code import CodeLine, is_own_file, place_in


def script_line() -> str:
    """The line that the calling thread has reached: ``train.py:31 (main)``, for example."""
    own = next(filter(_is_users, frames_of(sys._getframe())), None)
    return str(_line(own)) if own is not None else "the script"


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
    return place_in(map(_line, frames_of(frame)))


def lines_of(frame: FrameType) -> Iterator[str]:
    """The lines that led to a frame, the innermost first, without those of this package."""
    return (str(line) for line in map(_line, frames_of(frame)) if not line.module.startswith("swift_ft."))


def _is_users(frame: FrameType) -> bool:
    return is_own_file(frame.f_code.co_filename)


def _line(frame: FrameType) -> CodeLine:
    code, module = frame.f_code, frame.f_globals.get("__name__", "?")
    return CodeLine(code.co_filename, frame.f_lineno, code.co_name, module)
