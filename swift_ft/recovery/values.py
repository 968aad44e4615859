"""Frozen values made quickly. Pure.

One event makes a few new values of many fields, and a block of reports makes thousands. The constructor of a
frozen dataclass sets each field by a call in Python, and ``dataclasses.replace`` looks at all fields again:
that was half of what an event cost. Both functions here need a dataclass without ``__post_init__``.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from typing import Any, TypeVar

T = TypeVar("T")


def replace(value: T, /, **changes: Any) -> T:
    """As :func:`dataclasses.replace`, for a value whose fields may all be given by position."""
    make, numbers, fields_of = _class_of(type(value))  # type: ignore[arg-type]  # a class is hashable
    fields = list(fields_of(value))
    for name, change in changes.items():
        fields[numbers[name]] = change
    new: T = make(*fields)
    return new


@functools.cache
def _class_of(kind: type) -> tuple[Callable[..., Any], dict[str, int], Callable[[Any], tuple[Any, ...]]]:
    """The constructor, the numbers of the fields, and what finds all of them."""
    names = [field.name for field in dataclasses.fields(kind)]
    assert len(names) > 1
    return kind, {name: number for number, name in enumerate(names)}, operator.attrgetter(*names)


def made(kind: type[T], count: int, columns: Mapping[str, Iterable[Any]]) -> list[T]:
    """Many values, field by field. A field without a column has its default.

    Raises:
        TypeError: if a field has neither.
    """
    values = list(map(object.__new__, repeat(kind, count)))
    for name, put, default in _fields_of(kind):  # type: ignore[arg-type]  # a class is hashable
        column = columns[name] if name in columns else _defaults(kind, name, default, count)
        deque(map(put, values, column), maxlen=0)
    return values


def _defaults(kind: type, name: str, default: Any, count: int) -> Iterable[Any]:
    if default is dataclasses.MISSING:
        raise TypeError(f"{kind.__name__} needs {name}")
    return repeat(default, count)


@functools.cache
def _fields_of(kind: type) -> tuple[tuple[str, Callable[[Any, Any], None], Any], ...]:
    """The name, the setter of the slot, and the default of each field."""
    fields = dataclasses.fields(kind)
    return tuple((field.name, getattr(kind, field.name).__set__, _default_of(field)) for field in fields)


def _default_of(field: dataclasses.Field[Any]) -> Any:
    """One for all values, which are frozen, and so is what they hold."""
    made_by = field.default_factory
    return field.default if made_by is dataclasses.MISSING else made_by()
