"""Finds iterators that a script takes its batches from: they do not go back when a step is repeated."""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from pathlib import Path
from types import GeneratorType
from typing import Any

from swift_ft.program.loop_frame import loop_frame
from swift_ft.program.own_code import is_own_file

_SESSION = str(Path(__file__).parents[1] / "session.py")
"""Whose generators are a session's steps."""


def iterators_of_script() -> list[str]:
    """Names of the variables that hold one, in the function that runs the loop and in its module.

    ``zip`` stands for the loop's own, as in ``for step, batch in zip(session.steps(n), loader)``.
    """
    frame = loop_frame()
    if frame is None:
        return []
    variables = {**frame.f_globals, **frame.f_locals}
    found = [name for name, value in variables.items() if _gives_batches(value)]
    return [*found, "zip"] if _zips_steps() else found


def _gives_batches(value: Any) -> bool:
    if isinstance(value, GeneratorType):
        return is_own_file(value.gi_code.co_filename)  # not the steps themselves
    try:
        return isinstance(value, Iterator) and not isinstance(value, (io.IOBase, enumerate))
    except Exception:
        return False


def _zips_steps() -> bool:
    """Whether a loop goes through a session's steps and something else side by side."""
    for one in gc.get_objects():
        if type(one) is zip:
            members = [*_members(one)]
            if len(members) > 1 and any(map(_are_steps, members)):
                return True
    return False


def _members(zipped: zip[Any]) -> Iterator[Any]:
    for held in gc.get_referents(zipped):
        if isinstance(held, tuple):
            yield from held


def _are_steps(member: Any) -> bool:
    while isinstance(member, enumerate):
        member = next((held for held in gc.get_referents(member) if not isinstance(held, int)), None)
    return isinstance(member, GeneratorType) and member.gi_code.co_filename == _SESSION
