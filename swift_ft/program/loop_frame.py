"""The frame of the script's own function that runs its training loop, and the variables in it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from swift_ft.program.own_code import is_own_file

_WRITES_THROUGH = sys.version_info >= (3, 13)
"""True if ``f_locals`` is a view of the variables (PEP 667). Before, it is a copy, as debuggers know."""


def loop_frame() -> FrameType | None:
    """The innermost frame of the user's own code; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_own_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def set_variables(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Give variables of a function that waits for a call to return other values."""
    if not values:
        return
    variables = frame.f_locals
    variables.update(values)
    if not _WRITES_THROUGH and variables is not frame.f_globals:
        # The call with which a debugger changes a variable of the function that it looks at.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
