"""Objects that a script's variables, attributes and lists hold, and others in each step.

The content of a library's object is its library's matter, and so it neither goes back with a step nor
travels: a repeated step finds the newer one, and a replacement the one that its own script makes. An object
of the script's own goes back, and what it holds travels, but no other process makes the object: a list that
steps fill with such objects has those of its own script's beginning in a replacement. In the first steps all
of these are named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from swift_ft.checkpoint.step.containers import content_in
from swift_ft.checkpoint.step.kinds import (
    HOLDERS,
    MOST_ELEMENTS,
    PROXIES,
    is_object,
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


class ObjectsOfSteps:
    """Compares them with those of the step before.

    Args:
        variables: finds what a script can reach.
    """

    def __init__(self, variables: ScriptVariables) -> None:
        self._variables = variables
        self._of_libraries, self._of_script = _Changes(), _Changes()

    def check(self) -> None:
        """A step begins. Call it after a look of the variables."""
        values = [*self._values()]
        if new := self._of_libraries.among((name, _of_libraries(value)) for name, value in values):
            _logger.warning(
                "%s: another object of a library than in the step before. A repeated step finds the newer "
                "one, and a replacement one of its own script: if a later step reads it, keep what it is "
                "made of in its place, as numbers or tensors",
                shortened(new),
                extra={"event": "library_objects_change", "variables": new},
            )
        if new := self._of_script.among((name, _of_script(value)) for name, value in values):
            _logger.warning(
                "%s: other objects of the script's own than in the step before. A replacement has only those "
                "that its script makes before the first step: if a later step reads them, keep what they are "
                "made of in their place, as numbers, text, tensors, tuples or dictionaries",
                shortened(new),
                extra={"event": "own_objects_change", "variables": new},
            )

    def _values(self) -> Iterator[tuple[str, Any]]:
        """All variables that later steps may read.

        Of a loop in no function that is not known: its variables are left out.
        """
        frames = [*loop_frames(self._variables.epochs).values()]
        of_loop = [frame.f_globals for frame in frames if frame.f_locals is frame.f_globals]
        for namespace, name in self._variables.slots:
            owner = namespace.owner
            if isinstance(owner, nn.Module) and (name.startswith("_") or not is_own_class(type(owner))):
                continue  # its library's own
            if not any(namespace.variables is one for one in of_loop):
                yield f"{namespace.path}.{name}".lstrip("."), namespace.variables.get(name)
        for frame in frames:
            if frame.f_locals is not frame.f_globals:
                for name in read_later(frame):
                    yield name, frame.f_locals.get(name)


class _Changes:
    """Names of what holds other objects than in the step before, each once."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, ...]] = {}  # as the last step began, by name: of each the id()
        self._told: set[str] = set()

    def among(self, found: Iterable[tuple[str, list[Any] | None]]) -> list[str]:
        """Those of a step. None instead of the objects of what cannot have any."""
        now = {name: tuple(map(id, objects)) for name, objects in found if objects is not None}
        new = {name for name, numbers in now.items() if self._held.get(name, numbers) != numbers} - self._told
        self._held = now
        self._told |= new
        return sorted(new)


def _of_libraries(value: Any) -> list[Any] | None:
    """Those in a value; None if it can have none. A list that has none yet counts."""
    if type(value) in PROXIES:
        return None
    if isinstance(value, HOLDERS):
        return _held(value, _is_of_library)
    return [value] if _is_of_library(value) else None


def _of_script(value: Any) -> list[Any] | None:
    """Those in a container; None of all else. Modules and optimizers are watched elsewhere."""
    return _held(value, _is_of_script) if issubclass(type(value), HOLDERS) else None


def _held(container: Any, is_one: Callable[[Any], bool]) -> list[Any] | None:
    """Those of its things; None of one that is too large to be looked into."""
    return [*filter(is_one, content_in(container))] if len(container) <= MOST_ELEMENTS else None


def _is_of_script(value: Any) -> bool:
    return is_object(value) and not isinstance(value, nn.Module | Optimizer)


def _is_of_library(value: Any) -> bool:
    if is_understood(value) or stays_where_it_is(value):
        return False
    return not type(value).__module__.startswith(_OF_A_STEP)
