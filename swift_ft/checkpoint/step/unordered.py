"""Things without a place of their own: in sets, and in dictionaries whose keys are known by their addresses.

The order of a set, and the ``repr()`` and the ``id()`` of an object, are other ones in each process. A path
that is made of them would lead a replacement to another thing, and give it the value of this one.
"""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

from swift_ft.checkpoint.step.containers import content_in, items_in
from swift_ft.checkpoint.step.kinds import FIXED_EXACTLY, MOST_ELEMENTS, OF_BYTES, is_fixed
from swift_ft.checkpoint.step.references import LEAST_ADDRESS, References

NAMELESS = "[(no order)]"
"""In the path of what only sets and the like lead to. It goes back with a step, and does not travel."""
UNORDERED = (frozenset, *map(type, ({}.keys(), {}.values(), {}.items())))
"""Containers that never change in themselves, and in which nothing has a place of its own."""
_OF_LIBRARIES = (type, FunctionType, BuiltinFunctionType, MethodDescriptorType)
"""Keys that have a name, which is the same in each process unless a function has made them."""
_NUMBER = re.compile(r" \(\d+\)")
_ADDRESS = re.compile(r"\bat 0x[0-9A-Fa-f]+")

_Found = tuple[str, Any, bool]
"""A path, what it leads to, and whether a container holds that."""


class NamesOfKeys:
    """Gives keys of dictionaries names that are the same in each process.

    Args:
        paths: of objects that were found, by ``id()``: more of them as a look goes on.
        seen: all that was found.
        references: by which the state's parameters and modules have their names.
    """

    def __init__(self, paths: Mapping[int, str], seen: Mapping[int, Any], references: References) -> None:
        self._paths, self._seen, self._references = paths, seen, references

    def of(self, key: Any) -> str | None:
        """None of a key that has none, or none yet."""
        kind = type(key)
        if kind is int and key >= LEAST_ADDRESS:
            name = self._references.words_of_number(key) or self._path(key)
            return name and f"id({name})"
        if kind in FIXED_EXACTLY:
            return repr(key)
        if kind is tuple or kind is frozenset:
            return self._of_several(key)
        if is_fixed(key):
            return repr(key)
        if isinstance(key, weakref.ref):
            return None if key() is None else self.of(key())
        if isinstance(key, _OF_LIBRARIES) and "<" not in key.__qualname__ and (home := _home_of(key)):
            return f"{home}.{key.__qualname__}"
        if isinstance(key, ModuleType):
            return key.__name__
        if name := self._references.words_of(key) or self._path(id(key)):
            return name
        # For mypy the functions have unlike signatures, so that they could never be the same one.
        if kind.__hash__ is object.__hash__:  # type: ignore[comparison-overlap]
            return None
        try:
            text = repr(key)
        except Exception:  # one of the script's own
            return None
        return None if _ADDRESS.search(text) else text

    def at_last(self, key: Any) -> str | None:
        """When all has been found: a number that is nobody's ``id()`` is just a number."""
        return repr(key) if type(key) is int and key not in self._seen else self.of(key)

    def _of_several(self, keys: tuple[Any, ...] | frozenset[Any]) -> str | None:
        names = [name for one in keys if (name := self.of(one)) is not None]
        if len(names) < len(keys):
            return None
        if isinstance(keys, frozenset):
            return f"frozenset({{{', '.join(sorted(names))}}})"
        return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"

    def _path(self, number: int) -> str | None:
        path = self._paths.get(number)
        return None if path is None or NAMELESS in path else path


def _home_of(key: Any) -> str | None:
    """The module that a function of a library is in. A method of one object has none."""
    return getattr(key, "__module__", None) or getattr(getattr(key, "__objclass__", None), "__module__", None)


class Todo:
    """The things that a look still has to look into: those with a path first, and at the end all others.

    Args:
        roots: by name, and those that come after all that these lead to.
        keys: gives keys their names.
    """

    def __init__(self, roots: Iterable[Iterable[tuple[str, Any]]], keys: NamesOfKeys) -> None:
        self._named, self._last = (deque[_Found]((*root, False) for root in some) for some in roots)
        self._keys = keys
        self._waiting: list[tuple[str, Any, Any]] = []  # a dictionary's path, and an entry without a name yet
        self._may_be_named = True  # some of these, when all with a name has been looked into
        self._nameless: deque[_Found] = deque()

    def __bool__(self) -> bool:
        return bool(self._named or self._last or self._waiting or self._nameless)

    def pop(self) -> _Found:
        """The next one."""
        if not (self._named or self._last) and self._may_be_named:
            self._name_entries(self._keys.of)
            self._may_be_named = bool(self._named)
        if not (self._named or self._last or self._nameless):
            self._name_entries(self._keys.at_last)
        return (self._named or self._last or self._nameless).popleft()

    def add(self, found: Iterable[_Found]) -> None:
        """Look into these after all others."""
        for one in found:
            (self._nameless if NAMELESS in one[0] else self._named).append(one)

    def add_first(self, found: Iterable[_Found]) -> None:
        """Look into these next: parts of modules, which have a module's name, whoever else holds them."""
        for one in [*found][::-1]:
            (self._nameless if NAMELESS in one[0] else self._named).appendleft(one)

    def add_elements(self, path: str, container: Any) -> None:
        """Look into what a container holds."""
        if len(container) > MOST_ELEMENTS or isinstance(container, OF_BYTES):
            return
        if isinstance(container, dict):
            for key, value in _that_may_change(items_in(container)):
                if (name := self._keys.of(key)) is None:
                    self._waiting.append((path, key, value))
                else:
                    self.add([(f"{path}[{name}]", value, True)])
            self._add_nameless(path, (key for key, _ in items_in(container)))
        elif isinstance(container, set):
            self._add_nameless(path, content_in(container))
        elif isinstance(container, UNORDERED):
            plain: Iterable[Any] = [*container]  # type: ignore[misc]  # mypy knows no view by that
            self._add_nameless(path, plain)
        else:
            numbered = _that_may_change(enumerate(content_in(container)))
            self.add((f"{path}[{number}]", one, True) for number, one in numbered)

    def _add_nameless(self, path: str, content: Iterable[Any]) -> None:
        path += NAMELESS
        self._nameless.extend(
            (path, one, True)
            for one in content
            if type(one) not in FIXED_EXACTLY and (isinstance(one, frozenset) or not is_fixed(one))
        )

    def _name_entries(self, name_of: Callable[[Any], str | None]) -> None:
        """Things found since may have given keys a name. At last, those without one have none."""
        at_last = name_of == self._keys.at_last
        waiting, self._waiting = self._waiting, []
        for path, key, value in waiting:
            if (name := name_of(key)) is not None:
                self.add([(f"{path}[{name}]", value, True)])
            elif at_last:
                self._nameless.append((path + NAMELESS, value, True))
            else:
                self._waiting.append((path, key, value))


def _that_may_change(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    return (item for item in items if type(item[1]) not in FIXED_EXACTLY)


def in_words(path: str) -> str:
    """A path with :data:`NAMELESS` in it, as a user would write it: many have the same."""
    before, _, behind = path.partition(NAMELESS)
    return f"{before}[...]{_NUMBER.sub('', behind.replace(NAMELESS, '[...]'))}".lstrip(".")
