"""The sample that a dataset could not give, by the error that came of it."""

from __future__ import annotations

import re
import reprlib
import traceback
from pathlib import Path
from typing import NamedTuple

from torch.utils.data import Dataset

from swift_ft.program.own_code import is_own_file

_OF_A_PROCESS = re.compile(r"Caught \w+ in DataLoader (worker process \d+)\.\n")
"""torch has raised it again, with the traceback of the loader's process as its text."""
_FRAME = re.compile(r'^ +File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_LAST_LINE = re.compile(r"^(?P<kind>[^\W\d][\w.]*)(?:: (?P<text>.*))?$", re.MULTILINE)
"""Of a traceback: the class of the error and its text, whose further lines come after it."""


class BadSample(NamedTuple):
    """A sample that could not be read or made.

    Attributes:
        words: which one, as far as that is known.
        place: the line of the user's dataset, if it is known from the error's text alone.
        error: the line of the traceback there that says what it was.
        kind: the class of the error there, as the traceback says it; empty if it was raised here.
        text: its message.
    """

    words: str
    place: str = ""
    error: str = ""
    kind: str = ""
    text: str = ""


def bad_sample(error: BaseException) -> BadSample | None:
    """The sample whose making has failed. None if something else has."""
    if told := _OF_A_PROCESS.search(str(error)):  # some classes put words of their own before it
        text = str(error).rstrip()
        own = [
            f"{Path(file).name}:{line}, in {function}"
            for file, line, function in _FRAME.findall(text)
            if is_own_file(file)
        ]
        frames = [frame.end() for frame in _FRAME.finditer(text)]
        if (last := _LAST_LINE.search(text, frames[-1] if frames else 0)) is None:
            return BadSample(f"in DataLoader {told[1]}", own[-1] if own else "", text.splitlines()[-1])
        more = {"error": last[0], "kind": last["kind"], "text": last["text"] or ""}
        return BadSample(f"in DataLoader {told[1]}", own[-1] if own else "", **more)
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        code = frame.f_code
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
        match code.co_name, arguments:
            case "__getitem__" | "__getitems__", [Dataset() as dataset, index]:
                return BadSample(f"sample {reprlib.repr(index)} of {type(dataset).__name__}")
            case "__iter__" | "__next__", [Dataset() as dataset]:
                return BadSample(f"a sample of {type(dataset).__name__}")
    return None
