"""Enums, dataclasses and named tuples: their objects are saved and read back without calling anything."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import sys
from collections.abc import Iterable
from typing import Any

from swift_ft.program.own_code import is_own_module


class NotPlainError(Exception):
    """A value that cannot be read back.

    Args:
        value: it.
        why: the rest of a sentence about it.
        remedy: what to do.
    """

    def __init__(self, value: object, why: str, remedy: str) -> None:
        super().__init__(f"{type(value)} {why}")
        self.kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        self.why = why
        self.remedy = remedy
        self.path: list[Any] = []
        """The keys that lead to it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Unknown:
    """An object whose class the reader does not know. It can be compared, and written as it was.

    Attributes:
        kind: ``enum``, ``dataclass`` or ``namedtuple``.
        content: what it is made of.
    """

    kind: str
    name: str
    content: Any

    def __hash__(self) -> int:
        """Without the content, which is a list or a dict: an enum may be a key, or in a set."""
        return hash((self.kind, self.name))


class KnownClasses:
    """The classes of which a reader makes objects.

    Args:
        classes: those of the values that it has itself.
        homes: names of modules whose other enums, dataclasses and named tuples it knows as well.
        own_files: so it does with those of all files of the script that are imported by then.
    """

    def __init__(
        self, classes: Iterable[type] = (), homes: Iterable[str] = (), *, own_files: bool = False
    ) -> None:
        self._homes = frozenset(homes)
        self._own_files = own_files
        self._classes: dict[str, type | None] = {}
        self.add(classes)

    def add(self, classes: Iterable[type]) -> None:
        """Know more classes: those of values that every process has before it reads anything."""
        for one in classes:
            name = name_of(one)
            other = self._classes.setdefault(name, one)
            if other is not one:
                self._classes[name] = None  # two local classes of one name: which is meant is not known

    def find(self, name: str) -> type | None:
        """The class of a name; None if it is not known."""
        if name in self._classes:
            return self._classes[name]
        home, _, path = name.partition(":")
        if home not in self._homes and not (self._own_files and is_own_module(home)):
            return None
        found = _class_in(home, path)
        return found if found is not None and kind_of(found) and name_of(found) == name else None


def own_class(name: str) -> type | None:
    """The class of a name in a file of the script that is imported by now; None if it has none."""
    home, _, path = name.partition(":")
    found = _class_in(home, path) if is_own_module(home) else None
    return found if found is not None and name_of(found) == name else None


def _class_in(home: str, path: str) -> type | None:
    found: Any = sys.modules.get(home)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


NOTHING_KNOWN = KnownClasses()
_EMPTY: Any = object()
"""In a slot without a value."""


def name_of(kind: type) -> str:
    """The name of a class in what is saved."""
    return f"{kind.__module__}:{kind.__qualname__}"


def kind_of(kind: type) -> str:
    """The way to make objects of a class without calling it (``enum``, ``namedtuple`` or ``dataclass``).

    Empty if none is known.
    """
    if issubclass(kind, enum.Enum):
        return "enum"
    if issubclass(kind, tuple):
        plain = hasattr(kind, "_fields") and hasattr(kind, "_make") and kind.__reduce__ is object.__reduce__
        return "namedtuple" if plain else ""
    if dataclasses.is_dataclass(kind):
        changed = (
            getattr(kind, name, None)
            for name in ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
            if getattr(kind, name, None) is not getattr(object, name, None)
        )
        own = any(getattr(method, "__module__", "") != "dataclasses" for method in changed)
        return "" if own else "dataclass"
    return ""


def attributes(value: Any) -> dict[str, Any]:
    """All that an object of a dataclass holds, in its dict or in slots."""
    names = [name for base in type(value).__mro__ for name in _slots(base)]
    found = {name: _slot(value, name) for name in names if name not in ("__dict__", "__weakref__")}
    more = _slot(value, "__dict__")
    full = {name: one for name, one in found.items() if one is not _EMPTY}
    return {**full, **({} if more is _EMPTY else more)}


def _slot(value: Any, name: str) -> Any:
    """Its ``__getattr__`` is not asked, which may raise any error, as ``dict.__getitem__`` does."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return _EMPTY


def _slots(base: type) -> Iterable[str]:
    slots = base.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def members(value: enum.Enum) -> list[str]:
    """The names of an enum's member, or of the members that a flag consists of."""
    if not isinstance(value, enum.Flag):
        return [value._name_]
    named = type(value).__members__.items()
    return [name for name, one in named if one.value and one.value & value.value == one.value]


def member(kind: type[enum.Enum], names: list[str]) -> enum.Enum:
    """The member, or the union of flags, that has the names. The inverse of :func:`members`."""
    if not issubclass(kind, enum.Flag):
        return kind.__members__[names[0]]
    return functools.reduce(operator.or_, (kind.__members__[name] for name in names), kind(0))
