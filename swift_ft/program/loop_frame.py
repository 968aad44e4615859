"""The frames of the script's own functions that run its training loop, and the variables in them."""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

from swift_ft.program.own_code import is_of_program

_WRITES_THROUGH = sys.version_info >= (3, 13)
"""True if ``f_locals`` is a view of the variables (PEP 667). Before, it is a copy, as debuggers know."""


LOOP, EPOCHS, PASSES_ON = "(loop)", "(epochs)", "(passes on)"
"""Names of the functions that run the loop over steps, of the one over epochs around it, and of a generator
of the script's own that passes steps on to the loop."""
FUNCTIONS = (LOOP, EPOCHS, PASSES_ON)


def loop_frame() -> FrameType | None:
    """The frame of the user's own code that runs the loop; None if there is none.

    The innermost one, but for generators and ``__next__``: these pass on what they take.
    """
    return _loop_of([*_own_frames()])


def _loop_of(own: Sequence[FrameType]) -> FrameType | None:
    return next((frame for frame in own if not _passes_on(frame.f_code)), own[0] if own else None)


def _own_frames() -> Iterator[FrameType]:
    """The innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_of_program(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _passes_on(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_GENERATOR) or code.co_name == "__next__"


def loop_frames(epochs: CodeType | None) -> dict[str, FrameType]:
    """The frames of the user's own code that run a loop, by the names above, the outermost one first.

    A script may run the steps of each epoch in a function of their own, as in ``train_one_epoch(...)``.

    Args:
        epochs: the code that runs the loop over epochs; None in a script without one.
    """
    own = [*_own_frames()]
    inner = _loop_of(own)
    outer = inner if epochs is not None else None
    while outer is not None and outer.f_code is not epochs:
        outer = outer.f_back
    found = {EPOCHS: outer} if outer is not None else {}
    if inner is not None and inner is not outer:
        found[LOOP] = inner
    if own and own[0] is not inner:
        found[PASSES_ON] = own[0]
    return found


def set_variables(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Give variables of a function that waits for a call to return other values."""
    if not values:
        return
    variables = frame.f_locals
    variables.update(values)
    if not _WRITES_THROUGH and variables is not frame.f_globals:
        # The call with which a debugger changes a variable of the function that it looks at.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
