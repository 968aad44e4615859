"""Copies of containers of other classes than ``list``, ``dict``, ``set`` and ``deque``: with the class.

An ``OrderedDict`` that came as a ``dict`` would have no ``move_to_end()``, and a ``Counter`` no zeros. No
class is called to make an object of it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

from swift_ft.checkpoint.plain_classes import attributes, name_of, own_class
from swift_ft.checkpoint.plain_values import FACTORIES
from swift_ft.checkpoint.step.references import UNKNOWN

OF_CLASS, CONTENT = "swift_ft.class", "swift_ft.content"
"""Keys of the name, and of what is in it as a container of Python's plain classes."""
_FACTORY, _BARE = "swift_ft.factory", "swift_ft.bare"
"""Of what a ``defaultdict`` makes its entries, and whether content is all that there is to an object."""
_PLAIN = (list, dict, set, deque, tuple)
_MADE: tuple[type, ...] = (OrderedDict, defaultdict, dict, list, set, deque)
"""Classes whose functions make an object of a class that derives from them; the first one that does."""
_KNOWN: dict[str, type] = {name_of(kind): kind for kind in (OrderedDict, Counter, defaultdict)}


def with_class(container: Any, content: Any) -> Any:
    """A copy of what is in a container, with the name of its class unless that is a plain one."""
    kind = type(container)
    if kind in _PLAIN or isinstance(container, tuple):
        return content
    makes = container.default_factory if isinstance(container, defaultdict) else None
    factory = getattr(makes, "__name__", "")
    bare = kind in _KNOWN.values() or not attributes(container)
    if makes is not None and FACTORIES.get(factory) is not makes:
        factory, bare = "", False
    return {OF_CLASS: name_of(kind), CONTENT: content, _FACTORY: factory, _BARE: bare}


def is_of_class(container: Any, value: dict[str, Any]) -> bool:
    """Whether a container is of the class of a copy, and as long at most."""
    return name_of(type(container)) == value[OF_CLASS] and longest(container) == longest(value[CONTENT])


def longest(container: Any) -> int | None:
    """The length that a deque keeps to; None of one without, and of all else."""
    return container.maxlen if isinstance(container, deque) else None


def empty(value: dict[str, Any]) -> Any:
    """A new container of the class of a copy; ``UNKNOWN`` if none can be made here."""
    kind = _KNOWN.get(value[OF_CLASS]) or own_class(value[OF_CLASS])
    if kind is None or not issubclass(kind, _MADE) or not value[_BARE]:
        return UNKNOWN
    base: Any = next(one for one in _MADE if issubclass(kind, one))
    made = base.__new__(kind)
    if base is deque:
        deque.__init__(made, (), value[CONTENT].maxlen)
    elif base is defaultdict:
        defaultdict.__init__(made, FACTORIES[value[_FACTORY]] if value[_FACTORY] else None)
    elif base is OrderedDict:
        OrderedDict.__init__(made)
    return made
