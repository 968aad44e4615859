"""The variables of a data set as the processes have them that load its batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from swift_ft.checkpoint.step.containers import content_in
from swift_ft.checkpoint.step.frozen import same
from swift_ft.checkpoint.step.kinds import CONTAINERS, MOST_ELEMENTS, is_fixed
from swift_ft.checkpoint.step.leaves import MOST_BYTES, fingerprint_of
from swift_ft.checkpoint.step.reach import MISSING, Namespace
from swift_ft.data.script_variables import contents_of, objects_from
from swift_ft.program.own_code import is_own_class

_NAMED = 5
_MOST_OBJECTS = 1000
"""That are looked into: more are samples, as a rule."""
_MOST_CONTENT = 2**14
"""Elements of all containers together: more are samples, and to compare them takes a millisecond."""


class ForkedVariables:
    """Notes the variables that processes were forked with, and sees which of them the script changes later.

    The processes have what was there as they began, and go on with it. Not compared are states of generators,
    arrays of more than 1 MiB, and what is in containers of more than 1,024 elements.

    Args:
        roots: the data set and whatever else of the script makes samples or batches in the processes.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._noted: list[tuple[Namespace, dict[str, _Noted]]] = []
        self.note()

    def note(self) -> None:
        """All are as they should be now: what has changed since the last note was not the script's doing."""
        room = _Room()
        self._noted = [
            (one, {name: _Noted(one.variables[name], room) for name in one.names()})
            for one in self._namespaces()
        ]

    def changed(self) -> list[str]:
        """Names of the variables that are others since the last note, with those of their classes."""
        found = []
        for one, noted in self._noted:
            kind = one.owner if isinstance(one.owner, type) else type(one.owner)
            names = [
                name for name, before in noted.items() if before.changed(one.variables.get(name, MISSING))
            ]
            names += [name for name in one.names() if name not in noted]
            found += [f"{kind.__name__}.{name}" for name in names]
        return found

    def _namespaces(self) -> Iterator[Namespace]:
        kinds: dict[type, None] = {}
        for one in islice(objects_from(*self._roots), _MOST_OBJECTS):
            yield Namespace("", one)
            kinds |= dict.fromkeys(filter(is_own_class, type(one).__mro__))
        yield from (Namespace("", kind) for kind in kinds)


def in_line(names: list[str]) -> str:
    """Some of these names, for a line."""
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


class _Room:
    """For elements that are compared one by one.

    Attributes:
        left: how many more.
    """

    def __init__(self) -> None:
        self.left = _MOST_CONTENT

    def takes(self, container: Any) -> bool:
        """Whether the elements of one more may be compared."""
        self.left -= len(container)
        return self.left >= 0 and len(container) <= MOST_ELEMENTS


class _Noted:
    """A variable's value, and what was in it."""

    def __init__(self, value: Any, room: _Room) -> None:
        self._value = value
        self._contents = [_Content(thing, room) for thing in contents_of(value, whole=True)]

    def changed(self, now: Any) -> bool:
        """Whether this is not the value that was noted, or other things are in it."""
        return not _is_same(now, self._value) or any(content.changed for content in self._contents)


class _Content:
    """One thing that may change in place, and what was in it."""

    def __init__(self, thing: Any, room: _Room) -> None:
        self._thing = thing
        self._whole = isinstance(thing, CONTAINERS) and room.takes(thing)
        self._before = self._now()

    @property
    def changed(self) -> bool:
        now = self._now()
        return len(now) != len(self._before) or not all(map(_is_same, now, self._before))

    def _now(self) -> tuple[Any, ...]:
        """All that is in a container, or how much it is. Of a tensor or an array a fingerprint."""
        thing = self._thing
        if isinstance(thing, bytearray):
            return (bytes(thing) if self._whole else len(thing),)
        if isinstance(thing, CONTAINERS):
            if not self._whole:
                return (len(thing),)
            return (*(thing if isinstance(thing, dict) else ()), *content_in(thing))
        if isinstance(thing, torch.Tensor) or (isinstance(thing, np.ndarray) and _is_compared(thing)):
            return (fingerprint_of(thing),)
        return ()


def _is_compared(array: np.ndarray) -> bool:
    in_memory = array.flags.writeable and not isinstance(array, np.memmap)
    return in_memory and array.nbytes <= MOST_BYTES


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (is_fixed(one) and is_fixed(other) and same(one, other))
