"""Variables of a script's objects that a loader changes as it gives batches, such as a data set's counter.

They go with the loader's place and not with the step: an iterator that has moved on stays where it is. So
they are not put back. A checkpoint has, and a replacement is given, what they were as the loader's epoch
began: it reads the epoch from there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any


class Counted:
    """The variables in which one loader counts.

    Attributes:
        things: containers and generators in such variables, by ``id()``.
        given: they were given the values of an epoch's beginning, from which it has to be read.
        begins: how often epochs have begun or ended.
    """

    def __init__(self) -> None:
        self._owners: dict[int, tuple[Any, set[str]]] = {}  # by id(); held, so that no other gets the number
        self.things: dict[int, Any] = {}
        self.given = False
        self.begins = 0
        self._begins: dict[tuple[int, str], Any] = {}  # copies, by id() of the owner; empty between epochs
        _living.add(self)

    def add(self, owner: Any, name: str) -> None:
        """A variable is one of them from now on."""
        self._owners.setdefault(id(owner), (owner, set()))[1].add(name)

    def names_in(self, owner: Any) -> set[str]:
        """Names of an object's variables that are among them."""
        found = self._owners.get(id(owner))
        return found[1] if found is not None else set()

    def begin_was(self, owner: Any, name: str, value: Any) -> None:
        """As the running epoch began, a variable had this value.

        Args:
            owner, name: the variable.
            value: a copy, or a trace where there can be none.
        """
        self._begins[id(owner), name] = value

    def epoch_begins(self) -> None:
        """:meth:`begin_was` has told all values."""
        self.begins += 1

    def epoch_is_over(self) -> None:
        """Values of now are those that the next epoch begins with."""
        self._begins = {}
        self.begins += 1

    def note(self) -> Callable[[], None]:
        """A step begins. What this returns is for when it is put back: it may have taken the last batch."""
        noted = self._begins

        def put_back() -> None:
            self._begins = noted or self._begins  # an epoch that the step has begun has its values already

        return put_back

    def at_begin(self, owner: Any, name: str, now: Any) -> tuple[Any, bool]:
        """A variable's value as the epoch began, and whether that is a copy; between epochs that of now."""
        found = self._begins.get((id(owner), name), self)
        return (now, False) if found is self else (found, True)

    def __len__(self) -> int:
        return sum(len(names) for _, names in self._owners.values())


_living: weakref.WeakSet[Counted] = weakref.WeakSet()


def counted_in(owner: Any) -> set[str]:
    """Names of an object's variables that a loader counts in."""
    return set().union(*(one.names_in(owner) for one in _living))


def counting_in(owner: Any) -> Iterator[tuple[Counted, str]]:
    """The loaders that count in an object, with the names of its variables, each once."""
    seen = set[str]()
    for one in [*_living]:
        for name in sorted(one.names_in(owner) - seen):
            seen.add(name)
            yield one, name


def note_counted() -> list[Callable[[], None]]:
    """:meth:`Counted.note` of all loaders."""
    return [one.note() for one in [*_living]]


def number_of_begins() -> int:
    """It grows as values that a replacement begins with become others: none before a loader counts."""
    return sum(one.begins for one in [*_living] if len(one))


def values_were_given() -> None:
    """All that loaders count has values of an epoch's beginning by now, which did not come from them."""
    for one in [*_living]:
        if len(one):
            one.epoch_is_over()
            one.given = True


def is_counted(number: int) -> bool:
    """Whether a loader counts in what has this ``id()``."""
    return any(number in one.things for one in _living)


def number_of_counted() -> int:
    """It grows as loaders are found to count in more variables."""
    return sum(map(len, _living))
