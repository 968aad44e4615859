"""Finds iterators that a script takes its batches from: they do not go back when a step is repeated."""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from types import FrameType, GeneratorType
from typing import Any

from swift_ft.program.loop_frame import loop_frame
from swift_ft.program.own_code import is_own_file


def iterators_of_script() -> list[str]:
    """Names of the variables that hold one, in the function that runs the loop and in its module.

    ``zip`` stands for the loop's own, as in ``for step, batch in zip(session.steps(n), loader)``.
    """
    frame = loop_frame()
    if frame is None:
        return []
    variables = {**frame.f_globals, **frame.f_locals}
    found = [name for name, value in variables.items() if _gives_batches(value)]
    return [*found, "zip"] if _zips_steps(frame) else found


def _gives_batches(value: Any) -> bool:
    if isinstance(value, GeneratorType):
        return is_own_file(value.gi_code.co_filename)  # not the steps themselves
    try:
        return isinstance(value, Iterator) and not isinstance(value, (io.IOBase, enumerate))
    except Exception:
        return False


def _zips_steps(frame: FrameType) -> bool:
    """Whether the loop in a frame goes through steps and something else side by side."""
    for one in gc.get_objects():
        if type(one) is zip:
            members = [*_members(one)]
            if any(_is_asked_by(member, frame) for member in members) and len(members) > 1:
                return True
    return False


def _members(zipped: zip[Any]) -> Iterator[Any]:
    for held in gc.get_referents(zipped):
        if isinstance(held, tuple):
            yield from held


def _is_asked_by(member: Any, frame: FrameType) -> bool:
    """Whether a generator runs now, on behalf of a frame."""
    while isinstance(member, enumerate):
        member = next((held for held in gc.get_referents(member) if not isinstance(held, int)), None)
    if not isinstance(member, GeneratorType) or member.gi_frame is None:
        return False
    return member.gi_running and member.gi_frame.f_back is frame
