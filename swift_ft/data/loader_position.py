"""A loader's place, as far as objects of the script count it: a data set, samplers, a function for batches.

What such an object changes while the loader makes a batch is counted: it goes with the place. What the script
changes in it at other times belongs to the script's steps, as all its variables do.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from swift_ft.checkpoint.step.containers import content_in
from swift_ft.checkpoint.step.counted import Counted
from swift_ft.checkpoint.step.kinds import CONTAINERS, MOST_ELEMENTS, is_object, is_understood
from swift_ft.checkpoint.step.leaves import Leaves
from swift_ft.checkpoint.step.reach import MISSING, Namespace, passed_on
from swift_ft.data.batch_source import samplers_of

_MOST_BYTES = 2**16
"""Of a tensor or an array in such an object that is compared before and after each batch."""
_SAMPLE = 64
"""Elements of a larger container that are compared then."""
_DEPTH = 3
"""Of containers in containers that are compared."""


class LoaderPosition:
    """Finds what a loader counts in objects of the script, and leads back to the begin of an epoch.

    Args:
        loader: whose batches are taken.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._counted = Counted()
        self._objects: list[Namespace] = []
        self._begins: dict[int, list[_Variable]] = {}  # of the last two epochs

    def begin(self, epoch: int, *, jumps: bool) -> None:
        """A pass over an epoch begins.

        Args:
            epoch: counted from 0.
            jumps: it does not follow the end of the one before.
        """
        self._objects = [Namespace("", one) for one in _objects_of(self._loader)]
        if jumps and self._begins:
            self._put_back(self._begins.get(epoch, next(iter(self._begins.values()))))
        self._begins = {n: begin for n, begin in self._begins.items() if n in (epoch - 1, epoch)}
        self._begins[epoch] = self._variables(whole=True)

    @contextmanager
    def giving(self) -> Iterator[None]:
        """Within the block the loader makes a batch, or begins an epoch."""
        before = self._variables()
        try:
            yield
        finally:
            for variable in before:
                if variable.changed:
                    self._count(variable)
            for one, name in self._new_since(before):
                self._count(_Variable(one, name, whole=False))

    def _count(self, variable: _Variable) -> None:
        self._counted.add(variable.owner, variable.name)
        for thing in (*variable.contents, *_contents(variable.now)):
            self._counted.things[id(thing)] = thing

    def _variables(self, *, whole: bool = False) -> list[_Variable]:
        return [_Variable(one, name, whole) for one in self._objects for name in one.variables]

    def _put_back(self, begin: list[_Variable]) -> None:
        for variable in begin:
            if variable.name in self._counted.names_in(variable.owner):
                variable.put_back()
        for one, name in self._new_since(begin):
            if name in self._counted.names_in(one.owner):
                one.write(name, MISSING)

    def _new_since(self, moment: list[_Variable]) -> list[tuple[Namespace, str]]:
        known = {(id(variable.owner), variable.name) for variable in moment}
        return [(one, n) for one in self._objects for n in one.variables if (id(one.owner), n) not in known]


class _Variable:
    """A variable of an object at one moment.

    Args:
        namespace: the object.
        name: the variable's.
        whole: note all elements of large containers, too, and not a sample.
    """

    def __init__(self, namespace: Namespace, name: str, whole: bool) -> None:
        self._namespace = namespace
        self.owner, self.name = namespace.owner, name
        self._value = self.now
        self.contents = [*_contents(self._value)]
        self._leaves = Leaves()
        self._samples: list[tuple[Any, list[Any]]] = []
        for thing in self.contents:
            if isinstance(thing, CONTAINERS) and len(thing) > MOST_ELEMENTS and not whole:
                self._samples.append((thing, _sample_of(thing)))
            else:
                self._leaves.add(thing, _MOST_BYTES)

    @property
    def now(self) -> Any:
        return self._namespace.variables.get(self.name, MISSING)

    @property
    def changed(self) -> bool:
        if self.now is not self._value or any(leaf.changed for leaf in self._leaves):
            return True
        return any(not _are_same(_sample_of(thing), sample) for thing, sample in self._samples)

    def put_back(self) -> None:
        if self._value is MISSING or is_understood(self._value):
            self._namespace.write(self.name, self._value)
        for leaf in self._leaves:
            leaf.put_back()


def _objects_of(loader: Any) -> Iterator[Any]:
    """The objects of the script that a loader asks in this process."""
    asked: tuple[Any, ...] = samplers_of(loader)
    if not getattr(loader, "num_workers", 0):
        asked += (getattr(loader, "dataset", None), getattr(loader, "collate_fn", None))
    todo = deque([loader] if is_object(loader) else asked)
    seen: dict[int, Any] = {}
    while todo:
        value = todo.popleft()
        if id(value) in seen or isinstance(value, nn.Module | Optimizer):
            continue
        seen[id(value)] = value
        if isinstance(value, functools.partial):
            todo += (value.func, value.args, value.keywords)
        elif isinstance(value, MethodType):
            todo.append(value.__self__)
        elif isinstance(value, (tuple, *CONTAINERS)):
            todo += _content_of(value)
        elif is_object(value):
            yield value
            todo += Namespace("", value).variables.values()
        else:
            todo += (one for _, one in passed_on(value))


def _sample_of(container: Any) -> list[Any]:
    length = len(container)
    if not isinstance(container, list | deque):
        return [length]
    return [length, *(container[place] for place in range(0, length, length // _SAMPLE)), container[-1]]


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return one[0] == other[0] and all(map(operator.is_, one[1:], other[1:]))


def _contents(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """All that may change in a value in place: itself, and containers in it."""
    yield value
    if depth and isinstance(value, CONTAINERS):
        for inner in _content_of(value):
            if isinstance(inner, CONTAINERS):
                yield from _contents(inner, depth - 1)


def _content_of(container: Any) -> tuple[Any, ...]:
    few = len(container) <= MOST_ELEMENTS and not isinstance(container, bytearray)
    return tuple(content_in(container)) if few else ()
