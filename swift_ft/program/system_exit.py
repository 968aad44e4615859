"""The end that a program asks for by ``sys.exit(...)``: its exit code, and whether a signal is behind it."""

from __future__ import annotations

import contextlib
import inspect
import signal
import sys
from functools import partial
from types import CodeType, FrameType
from typing import Any

_LONG = 1 << 63
"""The interpreter takes a number beyond a C long for -1."""


class SessionExit(SystemExit):
    """The end of a script that the session itself asks for, as where a check is over."""


def exit_code(end: SystemExit) -> int:
    """The exit code with which the interpreter ends for it: 0 for None, a number's lowest byte, else 1.

    Anything else is printed to stderr, as the interpreter does.
    """
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF if -_LONG <= end.code < _LONG else 0xFF
    with contextlib.suppress(Exception):  # nobody reads it any more, or it has no text
        print(end.code, file=sys.stderr)
    return 1


def is_of_signal(end: BaseException) -> bool:
    """Whether a handler of a signal has raised it, or what it was raised instead of."""
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    error: BaseException | None = end
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in codes and _was_given_a_frame(trace.tb_frame):
                return True
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
    return False


def _was_given_a_frame(frame: FrameType) -> bool:
    """Whether a function was called as a handler, with the interrupted frame. A script may call it itself."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + bool(code.co_flags & inspect.CO_VARARGS)]
    given = [frame.f_locals.get(name) for name in names]
    flat = [one for value in given for one in (value if isinstance(value, tuple) else (value,))]
    return any(isinstance(one, FrameType) for one in flat)


def _code_of(handler: Any) -> CodeType | None:
    """The code of a function, a method, one with arguments, or an object that can be called."""
    while isinstance(handler, partial):
        handler = handler.func
    if not hasattr(handler, "__code__"):
        handler = getattr(handler, "__call__", None)  # noqa: B004  (its code is asked for, and it may have none)
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, CodeType) else None
