"""The inverse of :func:`dataclasses.asdict`, also after a passage through JSON. Pure."""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def from_plain(kind: type[T], data: Mapping[str, Any]) -> T:
    """An object of a dataclass from its fields as plain values.

    Names that the class lacks are left out: a later version may have added them.

    Raises:
        TypeError: a field without a default is missing.
    """
    kinds = _kinds(kind)  # type: ignore[arg-type]  # a class is hashable
    return kind(**{name: _value(kinds[name], value) for name, value in data.items() if name in kinds})


@cache
def _kinds(kind: type[Any]) -> dict[str, Any]:
    """The type of each field."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _value(kind: Any, plain: Any) -> Any:
    """A value of a type. What JSON keeps stays as it is, and so does an object of a class."""
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType) and NoneType in of:  # X | None
        return plain if plain is None else _value(next(one for one in of if one is not NoneType), plain)
    if isinstance(plain, Mapping):
        if is_dataclass(kind):
            return from_plain(kind, plain)  # type: ignore[arg-type]
        if origin is abc.Mapping:  # JSON has no other keys than text
            key, content = of
            return {key(name): _value(content, value) for name, value in plain.items()}
    elif isinstance(plain, list | tuple):
        if origin is tuple:
            each = of[:1] * len(plain) if of[-1] is Ellipsis else of
            return tuple(_value(one, value) for one, value in zip(each, plain, strict=True))
        if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple
            return kind(*plain)
    return plain
