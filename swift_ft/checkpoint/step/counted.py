"""Variables of a script's objects that a loader changes as it gives batches, such as a data set's counter.

They go with the loader's place and not with the step: an iterator that has moved on stays where it is. So
they are neither put back nor handed over.
"""

from __future__ import annotations

import weakref
from typing import Any


class Counted:
    """The variables in which one loader counts.

    Attributes:
        things: containers and generators in such variables, by ``id()``.
    """

    def __init__(self) -> None:
        self._owners: dict[int, tuple[Any, set[str]]] = {}  # by id(); held, so that no other gets the number
        self.things: dict[int, Any] = {}
        _living.add(self)

    def add(self, owner: Any, name: str) -> None:
        """A variable is one of them from now on."""
        self._owners.setdefault(id(owner), (owner, set()))[1].add(name)

    def names_in(self, owner: Any) -> set[str]:
        """Names of an object's variables that are among them."""
        found = self._owners.get(id(owner))
        return found[1] if found is not None else set()

    def __len__(self) -> int:
        return sum(len(names) for _, names in self._owners.values())


_living: weakref.WeakSet[Counted] = weakref.WeakSet()


def counted_in(owner: Any) -> set[str]:
    """Names of an object's variables that a loader counts in."""
    return set().union(*(one.names_in(owner) for one in _living))


def is_counted(number: int) -> bool:
    """Whether a loader counts in what has this ``id()``."""
    return any(number in one.things for one in _living)


def number_of_counted() -> int:
    """It grows as loaders are found to count in more variables."""
    return sum(map(len, _living))
