"""Containers of a script are read and filled as those of Python's own classes.

A script may derive from these: what its classes do in ``update``, ``__setitem__`` or ``__iter__``, such as an
average, is done as the script trains, and not as a copy of its content is made or put back.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from typing import Any

from swift_ft.checkpoint.step.kinds import OF_BYTES

_PYTHONS: tuple[type, ...] = (OrderedDict, dict, list, deque, set, bytearray, array)
"""The class whose functions know where an object keeps its content: the first that it derives from."""


def base_of(container: Any) -> Any:
    """The class of Python's own that a container is of, or derives from."""
    kind = type(container)
    return kind if kind in _PYTHONS else next(one for one in _PYTHONS if issubclass(kind, one))


def content_in(container: Any) -> Any:
    """The values of a dictionary, and of another container its elements."""
    if isinstance(container, dict):
        return base_of(container).values(container)
    return container if type(container) in _PYTHONS else plain(container)


def items_in(container: Any) -> Iterable[tuple[Any, Any]]:
    """Keys and values of a dictionary, numbers and elements of another container."""
    if isinstance(container, dict):
        items: Iterable[tuple[Any, Any]] = base_of(container).items(container)
        return items
    return enumerate(content_in(container))


def plain(container: Any) -> Any:
    """The same things in a plain dictionary, set, bytearray or array, or in a list."""
    if isinstance(container, dict):
        return dict(base_of(container).items(container))
    if isinstance(container, list):
        return list.copy(container)
    if isinstance(container, deque):
        return [*deque.__iter__(container)]
    if isinstance(container, array):
        return array(container.typecode, container.tobytes())
    return bytearray(container) if isinstance(container, bytearray) else {*set.__iter__(container)}


def fill(container: Any, content: Collection[Any]) -> None:
    """Give a container another content, of the kind that :func:`plain` returns."""
    base = base_of(container)
    if base in (list, *OF_BYTES):
        base.__setitem__(container, slice(None), content)
        return
    if base is set:
        _fill_set(container, content)
        return
    base.clear(container)
    (base.extend if base is deque else base.update)(container, content)


def _fill_set(container: set[Any], content: Collection[Any]) -> None:
    """Remove what has come and add what is gone: so all others stay in their order."""
    stays = {*content}
    for one in [*set.__iter__(container)]:
        if one not in stays:
            set.discard(container, one)
    for one in content:
        set.add(container, one)


def put_at(container: Any, key: Any, value: Any) -> None:
    """Give a place of a dictionary, list or deque another content."""
    base_of(container).__setitem__(container, key, value)


def remove_at(container: dict[Any, Any], key: Any) -> None:
    """Remove an entry of a dictionary."""
    base_of(container).__delitem__(container, key)
