"""A loader's place, as far as objects of the script count it: a data set, samplers, a function for batches.

What such an object changes while the loader makes a batch is counted: it goes with the place. What the script
changes in it at other times belongs to the script's steps, as all its variables do.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from swift_ft.checkpoint.step.counted import Counted
from swift_ft.checkpoint.step.kinds import (
    CONTAINERS,
    MOST_ELEMENTS,
    is_copied,
    is_object,
    is_understood,
)
from swift_ft.checkpoint.step.leaves import MOST_BYTES, Leaves, Uncopied
from swift_ft.checkpoint.step.namespaces import MISSING, Namespace
from swift_ft.data.batch_source import samplers_of
from swift_ft.data.script_variables import contents_of, objects_from

_MOST_BYTES = 2**16
"""Of a tensor or an array in such an object that is compared before and after each batch."""
_MOST_READ_BYTES = 2**26
"""Of an array that is compared before and after some, and of what is put back where it is known to count."""
_FIRST_BATCHES = 4
"""That are looked at closely: who counts does so from the first batch on, as a rule."""
_SAMPLE = 64
"""Elements of a larger container that are compared in the others."""


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
        self._given = 0

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
        self._begins[epoch] = [
            _Variable(one, name, whole=True, to_put_back=True, counts=self._counts(one, name))
            for one, name in self._places()
        ]

    @contextmanager
    def giving(self) -> Iterator[None]:
        """Within the block the loader makes a batch, or begins an epoch."""
        self._given += 1
        closely = self._given <= _FIRST_BATCHES or self._given & (self._given - 1) == 0
        before = [
            _Known(one, name) if self._counts(one, name) else _Variable(one, name, whole=closely)
            for one, name in self._places()
        ]
        try:
            yield
        finally:
            for variable in before:
                if variable.changed:
                    self._count(variable.namespace, variable.name, variable.value)
            for one, name in self._new_since(before):
                self._count(one, name, MISSING)

    def _counts(self, one: Namespace, name: str) -> bool:
        return name in self._counted.names_in(one.owner)

    def _count(self, one: Namespace, name: str, before: Any) -> None:
        self._counted.add(one.owner, name)
        for value in (before, one.variables.get(name, MISSING)):
            for thing in contents_of(value, whole=True):
                self._counted.things[id(thing)] = thing

    def _places(self) -> list[tuple[Namespace, str]]:
        return [(one, name) for one in self._objects for name in one.variables]

    def _put_back(self, begin: list[_Variable]) -> None:
        for variable in begin:
            if self._counts(variable.namespace, variable.name):
                variable.put_back()
        for one, name in self._new_since(begin):
            if self._counts(one, name):
                one.write(name, MISSING)

    def _new_since(self, moment: Sequence[_Known]) -> list[tuple[Namespace, str]]:
        known = {(id(variable.namespace.owner), variable.name) for variable in moment}
        return [(one, name) for one, name in self._places() if (id(one.owner), name) not in known]


class _Known:
    """A variable of an object that is known to count.

    Args:
        namespace: the object.
        name: the variable's.
    """

    def __init__(self, namespace: Namespace, name: str) -> None:
        self.namespace, self.name = namespace, name
        self.value = namespace.variables.get(name, MISSING)

    @property
    def changed(self) -> bool:
        return True


class _Variable(_Known):
    """A variable of an object at one moment.

    Args:
        namespace, name: as of any.
        whole: note all elements of large containers, arrays, and what is in containers, and not a sample.
        to_put_back: and not only to see whether it changes.
        counts: it is known to do so.
    """

    def __init__(
        self,
        namespace: Namespace,
        name: str,
        *,
        whole: bool,
        to_put_back: bool = False,
        counts: bool = False,
    ) -> None:
        super().__init__(namespace, name)
        most_bytes = _MOST_READ_BYTES if counts else MOST_BYTES if to_put_back else _MOST_BYTES
        self._leaves = Leaves(None if counts else ())
        self._larger: list[Uncopied] = []
        self._samples: list[tuple[Any, list[Any]]] = []
        for thing in contents_of(self.value, whole=whole):
            if isinstance(thing, CONTAINERS) and len(thing) > MOST_ELEMENTS and not whole:
                self._samples.append((thing, _sample_of(thing)))
            elif isinstance(thing, torch.Tensor) and not is_copied(thing, most_bytes):
                self._larger.append(Uncopied(thing))
            elif isinstance(thing, np.ndarray) and thing.nbytes > most_bytes:
                self._larger += [Uncopied(thing)] if whole and _may_be_read(thing) else []
            else:
                self._leaves.add(thing, most_bytes)

    @property
    def changed(self) -> bool:
        if self.namespace.variables.get(self.name, MISSING) is not self.value:
            return True
        if any(leaf.changed for leaf in (*self._leaves, *self._larger)):
            return True
        return any(not _are_same(_sample_of(thing), sample) for thing, sample in self._samples)

    def put_back(self) -> None:
        if self.value is MISSING or is_understood(self.value):
            self.namespace.write(self.name, self.value)
        for leaf in self._leaves:
            leaf.put_back()


def _may_be_read(array: np.ndarray) -> bool:
    """Whether it may count, and takes little time: no table of samples in a file."""
    in_memory = array.flags.writeable and not isinstance(array, np.memmap)
    return in_memory and array.nbytes <= _MOST_READ_BYTES


def _objects_of(loader: Any) -> Iterator[Any]:
    """The objects of the script that a loader asks in this process."""
    if is_object(loader):
        return objects_from(loader)
    asked: tuple[Any, ...] = samplers_of(loader)
    if not getattr(loader, "num_workers", 0):
        asked += (getattr(loader, "dataset", None), getattr(loader, "collate_fn", None))
    return objects_from(*asked)


def _sample_of(container: Any) -> list[Any]:
    length = len(container)
    if not isinstance(container, list | deque):
        return [length]
    return [length, *(container[place] for place in range(0, length, length // _SAMPLE)), container[-1]]


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return one[0] == other[0] and all(map(operator.is_, one[1:], other[1:]))
