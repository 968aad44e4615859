"""Names what steps go on with, and a worker has of an earlier iteration than the rest: a sum of losses.

    for step in session.steps(n):
        with step:
            ...
            total += loss.item()     # each replica has its own: a replacement has an earlier one, ..
            count += 1               # .. and this is equal on all, so a replacement is given it
    mean = total / count

Nobody has the newer value: the replica that had it is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any

import numpy as np
import torch

from swift_ft.program.loop_frame import FUNCTIONS
from swift_ft.program.read_later import read_later
from swift_ft.units import shortened

_logger = logging.getLogger(__name__)

_NUMBERS = (int, float, complex, np.number, np.ndarray, torch.Tensor)
_OF_SCRIPT = ""
"""The path of the variables of the script itself, which are those of a loop that is in no function."""


def say_what_is_behind(
    behind: Collection[tuple[str, str]],
    handed_over: Mapping[str, Mapping[str, Any]],
    frames: Mapping[str, FrameType],
) -> None:
    """Name the variables that later steps go on with, and that are not of the iteration of the rest.

    Of a function's variables these are those that a step reads before it sets them. Of an object's, all, if
    the object has a number as well that was handed over: who reads it is not known.

    Args:
        behind: paths and names of what is of an earlier iteration, or of the beginning.
        handed_over: what is of this one, by path and name.
        frames: the functions that run the loop.
    """
    read = {
        _OF_SCRIPT if frame.f_locals is frame.f_globals else function: read_later(frame)
        for function, frame in frames.items()
    }
    found, beside = list[str](), list[str]()
    for path in sorted({path for path, _ in behind}):
        names = sorted(name for at, name in behind if at == path)
        others = [
            name
            for name, value in sorted(handed_over.get(path, {}).items())
            if isinstance(value, _NUMBERS) and not isinstance(value, bool)
        ]
        if path in read:
            names, others = ([name for name in some if name in read[path]] for some in (names, others))
        elif path in FUNCTIONS or path == _OF_SCRIPT or not others:
            continue
        found += [f"{path}.{name}".lstrip(".") for name in names]
        beside += [f"{path}.{name}".lstrip(".") for name in others] if names else []
    if found:
        _logger.warning(
            "steps go on with %s, and this worker has it of an earlier iteration than %s: a sum or a mean of "
            "it, if there is one, is wrong in this worker until it begins anew. Add up what is equal on all "
            "replicas, as dist.all_reduce() makes a loss: that is handed over as it was",
            shortened(found),
            shortened(beside) or "step.index",
            extra={"event": "variables_behind", "variables": found},
        )
