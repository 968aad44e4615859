"""Objects of libraries that a script's variables, attributes and lists hold, and others in each step.

What is in such an object is its library's matter, and so it neither goes back with a step nor travels: a
repeated step finds the newer one, and a replacement the one that its own script makes. In the first steps
they are named.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

from swift_ft.checkpoint.step.containers import content_in
from swift_ft.checkpoint.step.kinds import (
    CONTAINERS,
    MOST_ELEMENTS,
    OF_BYTES,
    is_understood,
    stays_where_it_is,
)
from swift_ft.checkpoint.step.script import ScriptVariables
from swift_ft.program.loop_frame import loop_frames
from swift_ft.program.own_code import is_own_class
from swift_ft.program.read_later import read_later
from swift_ft.units import shortened

_logger = logging.getLogger(__name__)

_OF_A_STEP = (
    "torch._C",
    "torch.autograd",
    "torch.cuda",
    "torch.distributed",
    "torch.profiler",
    "torch.utils",
)
"""Beginnings of names of modules whose objects serve one step only: handles, events, places."""


class LibraryObjects:
    """Compares them with those of the step before.

    Args:
        variables: finds what a script can reach.
    """

    def __init__(self, variables: ScriptVariables) -> None:
        self._variables = variables
        self._held: dict[str, tuple[int, ...]] = {}  # as the last step began, by name: of each the id()
        self._said: set[str] = set()

    def check(self) -> None:
        """A step begins. Call it after a look of the variables."""
        now = {name: tuple(map(id, objects)) for name, objects in self._objects()}
        found = [name for name, numbers in now.items() if self._held.get(name, numbers) != numbers]
        self._held = now
        if new := sorted({*found} - self._said):
            self._said |= {*new}
            _logger.warning(
                "%s: another object of a library than in the step before. A repeated step finds the newer "
                "one, and a replacement one of its own script: if a later step reads it, keep what it is "
                "made of in its place, as numbers or tensors",
                shortened(new),
                extra={"event": "library_objects_change", "variables": new},
            )

    def _objects(self) -> Iterator[tuple[str, list[Any]]]:
        """Those in each variable that later steps may read. A list that has none yet counts as well.

        Of a loop in no function that is not known: its variables are left out.
        """
        frames = [*loop_frames(self._variables.epochs).values()]
        of_loop = [frame.f_globals for frame in frames if frame.f_locals is frame.f_globals]
        for namespace, name in self._variables.slots:
            owner = namespace.owner
            if isinstance(owner, nn.Module) and (name.startswith("_") or not is_own_class(type(owner))):
                continue  # its library's own
            if not any(namespace.variables is one for one in of_loop):
                yield from _in_value(f"{namespace.path}.{name}".lstrip("."), namespace.variables.get(name))
        for frame in frames:
            if frame.f_locals is not frame.f_globals:
                for name in read_later(frame):
                    yield from _in_value(name, frame.f_locals.get(name))


def _in_value(name: str, value: Any) -> Iterator[tuple[str, list[Any]]]:
    if isinstance(value, CONTAINERS):
        if len(value) <= MOST_ELEMENTS and not isinstance(value, OF_BYTES):
            yield name, [one for one in content_in(value) if _is_of_library(one)]
    elif _is_of_library(value):
        yield name, [value]


def _is_of_library(value: Any) -> bool:
    if is_understood(value) or stays_where_it_is(value):
        return False
    return not type(value).__module__.startswith(_OF_A_STEP)
