"""The variables of a data set as the processes have them that load its batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from swift_ft.checkpoint.step.containers import content_in
from swift_ft.checkpoint.step.frozen import same
from swift_ft.checkpoint.step.kinds import CONTAINERS, FIXED_EXACTLY, MOST_ELEMENTS, is_fixed
from swift_ft.checkpoint.step.leaves import MOST_BYTES, fingerprint_of
from swift_ft.checkpoint.step.namespaces import MISSING, Namespace
from swift_ft.data.script_variables import contents_of, objects_from
from swift_ft.program.own_code import is_own_class

_MOST_OBJECTS = 1000
"""That are looked into: more are samples, as a rule."""
_OBJECTS_KEPT, _ELEMENTS_KEPT, _LETTERS_KEPT = 32, 16, 256
"""Of objects, tuples and strings whose values are kept with an epoch: they travel with the state."""
_EPOCH = "epoch"
_MOST_CONTENT = 2**14
"""Elements of all containers together: more are samples, and to compare them takes a millisecond."""
_MOST_READ = 2**22
"""Bytes of all arrays together: each batch reads them again, which takes a millisecond."""


class ForkedVariables:
    """Notes the variables that processes were forked with, and sees which of them the script changes later.

    The processes have what was there as they began, and go on with it. Not compared are states of generators,
    arrays of more than 1 MiB or of more than 4 MiB in all, and what is in containers of more than 1,024
    elements.

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
            for one in _namespaces_of(self._roots)
        ]

    def changed(self, *, unless_small: bool = False) -> list[str]:
        """Names of the variables that are others since the last note, with those of their classes.

        Args:
            unless_small: without those whose values :class:`EpochValues` keeps.
        """
        found = []
        for number, (one, noted) in enumerate(self._noted):
            now = one.variables
            names = [name for name, before in noted.items() if before.changed(now.get(name, MISSING))]
            if unless_small and number < _OBJECTS_KEPT:
                names = [n for n in names if not all(map(_is_small, (noted[n].value, now.get(n, MISSING))))]
            names += [name for name in one.names() if name not in noted]
            found += [f"{_kind_of(one)}.{name}" for name in names]
        return found


class EpochValues:
    """Small values that a loader's processes have begun an epoch with, for those that begin later in it.

    Such are those of a replacement: the script may have changed a value since the epoch began.

    Args:
        roots: as of :class:`ForkedVariables`, as the script has made them.

    Attributes:
        held: has those that the script has changed as its variables: so steps put them back, and a
            replacement is given them. What has not changed, as the number of a rank, its script makes.
    """

    def __init__(self, *roots: Any) -> None:
        self.held = SimpleNamespace()
        self._roots = roots
        self._made = {key: one.variables[name] for key, (one, name) in _places_of(roots)}
        self._values: dict[str, Any] = {}

    @contextmanager
    def of(self, epoch: int) -> Iterator[None]:
        """Within the block, in which processes begin, values are those of the epoch's begin, if it is known.

        Args:
            epoch: counted from 0.
        """
        places = dict(_places_of(self._roots))
        known = {**self._made, **vars(self.held)}
        later = []
        if known.get(_EPOCH) == epoch:
            for key in places.keys() & known.keys():
                one, name = places[key]
                if not _is_same(now := one.variables[name], known[key]):
                    later.append((one, name, now))
                    one.write(name, known[key])
        begun = {key: one.variables[name] for key, (one, name) in places.items()}
        changed = {key: v for key, v in begun.items() if not _is_same(v, self._made.get(key, MISSING))}
        self._values = {_EPOCH: epoch, **changed}
        try:
            yield
        finally:
            for one, name, now in later:
                one.write(name, now)
            self.keep(epoch)

    def keep(self, epoch: int) -> None:
        """A batch of an epoch is asked for: the processes that make it have begun with the same values.

        They are gone where the step was put back in which the epoch began, and that batch was there still.
        """
        if self._values.get(_EPOCH) == epoch and (held := vars(self.held)) != self._values:
            held.clear()
            held.update(self._values)


def _places_of(roots: Iterable[Any]) -> Iterator[tuple[str, tuple[Namespace, str]]]:
    """Variables with small values, by names that are the same in each process of a script."""
    for number, one in enumerate(islice(_namespaces_of(roots), _OBJECTS_KEPT)):
        for name in one.names():
            if _is_small(one.variables[name]):
                yield f"{number}.{_kind_of(one)}.{name}", (one, name)


def _is_small(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) <= _ELEMENTS_KEPT and all(map(_is_small, value))
    return type(value) in FIXED_EXACTLY and not (isinstance(value, str) and len(value) > _LETTERS_KEPT)


def _namespaces_of(roots: Iterable[Any]) -> Iterator[Namespace]:
    """Objects, and then their classes."""
    kinds: dict[type, None] = {}
    for one in islice(objects_from(*roots), _MOST_OBJECTS):
        yield Namespace("", one)
        kinds |= dict.fromkeys(filter(is_own_class, type(one).__mro__))
    yield from (Namespace("", kind) for kind in kinds)


def _kind_of(one: Namespace) -> str:
    kind = one.owner if isinstance(one.owner, type) else type(one.owner)
    return kind.__name__


class _Room:
    """For elements that are compared one by one, and for bytes of arrays, which are read for that.

    Attributes:
        left: how many more elements.
    """

    def __init__(self) -> None:
        self.left = _MOST_CONTENT
        self._bytes_left = _MOST_READ

    def takes(self, container: Any) -> bool:
        """Whether the elements of one more may be compared."""
        self.left -= len(container)
        return self.left >= 0 and len(container) <= MOST_ELEMENTS

    def takes_array(self, array: np.ndarray) -> bool:
        """Whether one more may be read."""
        in_memory = array.flags.writeable and not isinstance(array, np.memmap)
        if not in_memory or array.nbytes > min(MOST_BYTES, self._bytes_left):
            return False
        self._bytes_left -= array.nbytes
        return True


class _Noted:
    """A variable's value, and what was in it."""

    def __init__(self, value: Any, room: _Room) -> None:
        self.value = value
        things = islice(contents_of(value, whole=True), max(1, room.left))
        self._contents = [_Content(thing, room) for thing in things]

    def changed(self, now: Any) -> bool:
        """Whether this is not the value that was noted, or other things are in it."""
        return not _is_same(now, self.value) or any(content.changed for content in self._contents)


class _Content:
    """One thing that may change in place, and what was in it."""

    def __init__(self, thing: Any, room: _Room) -> None:
        self._thing = thing
        self._whole = (isinstance(thing, CONTAINERS) and room.takes(thing)) or (
            isinstance(thing, np.ndarray) and room.takes_array(thing)
        )
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
        if isinstance(thing, torch.Tensor) or (isinstance(thing, np.ndarray) and self._whole):
            return (fingerprint_of(thing),)
        return ()


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (is_fixed(one) and is_fixed(other) and same(one, other))
