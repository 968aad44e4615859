"""Paths that things keep from one look to the next, whatever a step gives them to.

A replacement looks for the same things after other steps, or none, and has to find each by the same path.
Nothing is kept alive here: a large one that the script has given up may be all that fits into the memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from swift_ft.checkpoint.step.kinds import CONTAINERS, is_object
from swift_ft.checkpoint.step.reach import Reach


@dataclass
class _Kept:
    """A thing that keeps its path.

    Attributes:
        path: the one that it keeps.
        reference: to it; None where its class allows none.
        value: instead of a reference, while a look holds it anyway. None of a container with large tensors,
            which not even looks hold (`results.py`).
    """

    path: str
    reference: weakref.ref[Any] | None = None
    value: Any = None

    def thing(self) -> Any:
        """The thing; None if it is gone, or nothing leads to it from here."""
        return self.value if self.reference is None else self.reference()

    @classmethod
    def of(cls, path: str, value: Any) -> _Kept:
        """Of a thing that a look has found; None as above."""
        try:
            return cls(path, reference=None if value is None else weakref.ref(value), value=None)
        except TypeError:
            return cls(path, value=value)


class KeptPaths:
    """Those of one script. They are given to each look, and learn from it."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}  # by id()
        self._of_epoch: set[int] = set()  # made at the top of an epoch: the next one may make others

    def __bool__(self) -> bool:
        return bool(self._kept)

    def path_of(self, value: Any) -> str | None:
        """The path that an object of the script's own has kept; None without one."""
        one = self._kept.get(id(value))
        if one is None or one.thing() is not value or isinstance(value, CONTAINERS):
            return None  # what is in a container is a part of it
        return one.path if is_object(value) else None

    def object_at(self, path: str) -> Any:
        """The inverse of :meth:`path_of`; None if nothing has this path."""
        found = (one.thing() for one in self._kept.values() if one.path == path)
        return next(filter(is_object, found), None)  # the function of a partial has the same one

    def before_look(self, heavy: Collection[int]) -> dict[int, tuple[str, Any]]:
        """The paths of what there still is, by ``id()``, and the things themselves.

        Args:
            heavy: the containers with large tensors that nobody has given up since the last look.
        """
        now: dict[int, tuple[str, Any]] = {}
        for number, one in self._kept.items():
            value = one.thing()
            if value is not None or (one.reference is None and number in heavy):
                now[number] = one.path, value
        self._forget(self._kept.keys() - now.keys())
        return now

    def make_way(self, found: Reach) -> bool:
        """Give up the paths of what cannot be reached any more, if other things want some of them.

        Returns:
            Whether that was so, and another look finds other paths.
        """
        if found.held_up <= found.seen.keys():
            return False
        self._forget(self._kept.keys() - found.seen.keys())
        return True

    @property
    def of_epochs(self) -> set[str]:
        """Those of what lines at the top of epochs have made."""
        return {self._kept[number].path for number in self._of_epoch}

    def make_way_for_epoch(self, before: Mapping[str, int], found: Reach) -> bool:
        """As :meth:`make_way`, of what earlier epochs have made: a replacement has what this one makes.

        Args:
            before: where the paths of earlier epochs led before these lines, as :attr:`Reach.leads_to`.
            found: by the look after them. Another thing may want a path, or have got it from these lines.
        """
        taken = found.held_up & self._of_epoch
        for number in self._of_epoch - taken:
            now = found.leads_to.get(path := self._kept[number].path)
            if now not in (None, number, before.get(path, number)):
                taken |= {number, now}
        taken &= self._of_epoch
        self._forget(taken)
        return bool(taken)

    def after_look(self, seen: Mapping[int, Any]) -> None:
        """Hold no more than the look does.

        Args:
            seen: all that it has found, by ``id()``; None for containers with large tensors.
        """
        held = [number for number, one in self._kept.items() if one.reference is None]
        for number in held:
            if number in seen:
                self._kept[number].value = seen[number]
        self._forget({*held} - seen.keys())

    def keep(self, names: Mapping[int, str], seen: Mapping[int, Any], *, of_epoch: bool) -> None:
        """These paths are kept from now on.

        Args:
            names: by ``id()``.
            seen: see :meth:`after_look`.
            of_epoch: until a later epoch makes another thing of that name.
        """
        self._kept |= {number: _Kept.of(path, seen[number]) for number, path in names.items()}
        if of_epoch:
            self._of_epoch |= names.keys()

    def _forget(self, numbers: Collection[int]) -> None:
        for number in numbers:
            del self._kept[number]
        self._of_epoch -= {*numbers}
