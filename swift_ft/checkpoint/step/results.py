"""Results of a step, such as a model's outputs: what is noted of a script must not keep their memory.

The script drops them as it makes the next ones. A look for all that there is would hold those of its moment
until the next look, many steps later, and the notes of two steps would hold those of both.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Container, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from swift_ft.checkpoint.step.containers import content_in
from swift_ft.checkpoint.step.kinds import FIXED_EXACTLY, HOLDERS, MOST_OF_GRAPH_BYTES, is_copied
from swift_ft.checkpoint.step.leaves import MOST_BYTES, Leaf
from swift_ft.checkpoint.step.reach import Reach

_FEW = 64
"""Elements of a container that may be what a model gave."""
_HOLDERS = (tuple, *HOLDERS)


class HeavyContainers:
    """Containers with large tensors that a look has found, until nobody else holds them.

    Attributes:
        containers: those, in the order in which they were found: the outer ones first.
    """

    def __init__(self) -> None:
        self.containers: deque[Any] = deque()
        self._seen: dict[int, Any] = {}
        self._large: dict[int, weakref.ref[Any]] = {}
        self._leaves: dict[int, list[weakref.ref[Leaf]]] = {}  # that notes have of them, by id()

    def take_from(self, found: Reach) -> None:
        """Let nothing else hold them, and nothing hold the large tensors themselves."""
        self._seen = seen = found.seen
        self.containers.clear()
        self._large.clear()
        self._leaves.clear()
        heavy: set[int] = set()
        for number, one in reversed([*seen.items()]):  # from within
            if _is_large(one):
                # Without a callback: an exception of the script's signal handler would be lost in one.
                seen[number] = self._large[number] = weakref.ref(one)
            elif _holds_large(one, heavy):
                heavy.add(number)
                self.containers.appendleft(one)
                seen[number] = None
        found.leaves = [one for one in found.leaves if id(one) not in heavy and not _is_large(one)]

    @property
    def large(self) -> list[Any]:
        """The large tensors and arrays, as far as there are any of them left."""
        return [one for one in (reference() for reference in self._large.values()) if one is not None]

    def noted(self, leaves: Mapping[int, Leaf]) -> None:
        """A note has leaves of them, by ``id()``."""
        for one in self.containers:
            if (leaf := leaves.get(id(one))) is not None:
                self._leaves.setdefault(id(one), []).append(weakref.ref(leaf))

    def let_go(self) -> None:
        """Of those that nobody else holds any more but notes: others may get their numbers then."""
        for number in [number for number, one in self._large.items() if one() is None]:
            del self._large[number]
            self._seen.pop(number, None)
        for _ in range(len(self.containers)):
            one = self.containers.popleft()
            leaves = [leaf for leaf in self._leaves.pop(id(one), ()) if leaf() is not None]
            if sys.getrefcount(one) - len(leaves) > _ALONE:
                self.containers.append(one)
                self._leaves[id(one)] = leaves
            else:
                self._seen.pop(id(one), None)


def holds_results(value: Any) -> bool:
    """Whether it is a container with a large tensor that has its graph, as the outputs of a step have."""
    if type(value) in FIXED_EXACTLY:  # most variables' are
        return False
    if not isinstance(value, _HOLDERS) or len(value) > _FEW:
        return False
    return any(
        (one.grad_fn is not None and one.nbytes > MOST_OF_GRAPH_BYTES)
        if isinstance(one, torch.Tensor)
        else isinstance(one, tuple) and holds_results(one)
        for one in _content_of(value)
    )


def _content_of(value: Any) -> Any:
    return value if isinstance(value, tuple) else content_in(value)


def _is_large(value: Any) -> bool:
    """Whether it is a tensor or an array that no step copies."""
    if isinstance(value, torch.Tensor):
        return not is_lazy(value) and (value.grad_fn is not None or not is_copied(value, MOST_BYTES))
    return isinstance(value, np.ndarray) and value.nbytes > MOST_BYTES


def _holds_large(value: Any, heavy: Container[int]) -> bool:
    """Whether it is a container that holds a large tensor, or one of other containers that do."""
    if not isinstance(value, _HOLDERS):
        return False
    return any(
        id(one) in heavy or _is_large(one) or (isinstance(one, tuple) and _holds_large(one, heavy))
        for one in _content_of(value)
        if type(one) not in FIXED_EXACTLY
    )


def _references_of_alone() -> int:
    one = deque([[0]]).popleft()
    return sys.getrefcount(one)


_ALONE = _references_of_alone()
"""References to what :meth:`HeavyContainers.let_go` has in its hands, and nobody else."""
