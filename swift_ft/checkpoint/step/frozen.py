"""Copies of a script's values that share nothing with them."""

from __future__ import annotations

import marshal
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from swift_ft.checkpoint.plain_classes import kind_of
from swift_ft.checkpoint.step.containers import content_in, plain
from swift_ft.checkpoint.step.kinds import (
    CONTAINERS,
    FIXED_EXACTLY,
    GENERATORS,
    MOST_ELEMENTS,
    OF_BYTES,
    is_copied,
    is_fixed,
    read_state,
)
from swift_ft.checkpoint.step.namespaces import MISSING
from swift_ft.checkpoint.step.of_class import CONTENT, with_class
from swift_ft.checkpoint.step.references import UNKNOWN, References
from swift_ft.torch_core.tensors import same_bits

GENERATOR = "swift_ft.generator"
"""The key of a generator's state."""
ARRAY = "swift_ft.array"
"""The key of the type of the numbers in an ``array.array``."""
_MOST_BYTES = 2**26
_MOST_OF_HISTORY = 2**16
"""Elements of a container of plain values, such as losses."""
_MANY = 64
"""Elements that are rather compared all at once."""


class Copier:
    """Copies values. What is one thing among them is one thing among the copies.

    Args:
        is_protected: tells tensors and containers that travel in another way.
        references: by which a parameter of the state has its name in its place.
    """

    def __init__(
        self,
        is_protected: Callable[[Any], bool] = lambda _: False,
        references: References | None = None,
    ) -> None:
        self._is_protected = is_protected
        self._references = references or References()
        self._done: dict[int, tuple[Any, Any]] = {}  # by id(): the value, which must live on, and its copy

    def copy(self, value: Any) -> Any:
        """A copy; a generator's state in its place, and :data:`UNKNOWN` for what cannot be copied."""
        if value is MISSING or is_fixed(value):
            return value
        if (done := self._done.get(id(value))) is None:
            self._done[id(value)] = value, UNKNOWN  # a container that holds itself has no copy
            done = self._done[id(value)] = value, self._copied(value)
        return done[1]

    def _copied(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and (name := self._references.of_parameter(value)) is not None:
            return name
        if self._is_protected(value):
            return UNKNOWN
        if isinstance(value, torch.Tensor):
            may = is_copied(value, _MOST_BYTES) and not isinstance(value, DTensor)  # its mesh is of here
            return _copy_of_tensor(value) if may else UNKNOWN
        if isinstance(value, np.ndarray):
            return value.copy() if value.nbytes <= _MOST_BYTES else UNKNOWN
        if isinstance(value, GENERATORS):
            return {GENERATOR: self.copy(read_state(value))}
        if not isinstance(value, (tuple, *CONTAINERS)):
            return UNKNOWN
        if isinstance(value, OF_BYTES):
            return _copy_of_bytes(value) if memoryview(value).nbytes <= _MOST_BYTES else UNKNOWN
        if len(value) > MOST_ELEMENTS:
            return self._history(value)
        inner = []
        for element in value if isinstance(value, tuple) else content_in(value):
            if (copied := self.copy(element)) is UNKNOWN:
                return UNKNOWN
            inner.append(copied)
        if isinstance(value, dict):
            keys = [*map(self._references.of_key, plain(value))]
            if any(key is UNKNOWN for key in keys):
                return UNKNOWN
            return _container_like(value, dict(zip(keys, inner, strict=True)))
        if isinstance(value, set) and not all(map(is_fixed, value)):
            return UNKNOWN  # it would have others in itself
        return _container_like(value, inner)

    def _history(self, value: Any) -> Any:
        """Many plain values, which share nothing."""
        if len(value) > _MOST_OF_HISTORY:
            return UNKNOWN
        content = value if isinstance(value, tuple | deque) else plain(value)
        parts = (content, content.values()) if isinstance(content, dict) else (content,)
        if not all(map(is_plain, parts)):
            return UNKNOWN
        if isinstance(content, dict) and self._references.are_in(content):
            return UNKNOWN
        return _container_like(value, content)


def frozen(value: Any) -> Any:
    """A copy of one value."""
    return Copier().copy(value)


def _copy_of_tensor(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    if type(tensor) is nn.Parameter:
        return nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


def _copy_of_bytes(value: bytearray | array[Any]) -> Any:
    return {ARRAY: value.typecode, CONTENT: bytes(value)} if isinstance(value, array) else bytearray(value)


def tuple_like(value: tuple[Any, ...], content: Iterable[Any]) -> tuple[Any, ...]:
    """A tuple, or a named tuple of the class of another one."""
    kind = type(value) if kind_of(type(value)) == "namedtuple" else tuple
    return tuple.__new__(kind, content)


def _container_like(value: Any, content: Any) -> Any:
    if isinstance(value, tuple):
        return tuple_like(value, content)
    if isinstance(value, deque):
        return with_class(value, deque(content, value.maxlen))
    kind: type = next(kind for kind in (list, set, dict) if isinstance(value, kind))
    return with_class(value, kind(content))


def is_plain(elements: Collection[Any]) -> bool:
    """Whether all of them, and those of tuples, are of the most common types that never change."""
    kinds = {*map(type, elements)} - FIXED_EXACTLY
    if kinds != {tuple}:
        return not kinds
    return FIXED_EXACTLY.issuperset(map(type, chain.from_iterable(e for e in elements if type(e) is tuple)))


def same(one: Any, other: Any) -> bool:
    """Whether two frozen values are the same, bit for bit."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.device == other.device and same_bits(one, other)
    if isinstance(one, np.ndarray):
        return bool(
            one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        )
    if isinstance(one, list | tuple | deque | dict) and len(one) == len(other) > _MANY:
        parts = (one, one.values()) if isinstance(one, dict) else (one,)
        if all(map(is_plain, parts)):
            return _all_bits(one) == _all_bits(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other)
    return bool(one == other)


def _all_bits(value: Any) -> bytes | None:
    """Of a container of plain values; None if there are others in it."""
    try:
        return marshal.dumps([*value] if isinstance(value, deque) else value, 2)
    except ValueError:
        return None
