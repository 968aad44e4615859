"""Copies of a script's values that share nothing with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from swift_ft.checkpoint.step.kinds import (
    CONTAINERS,
    FIXED_EXACTLY,
    GENERATORS,
    MOST_ELEMENTS,
    is_copied,
    is_fixed,
    read_state,
)
from swift_ft.checkpoint.step.reach import MISSING
from swift_ft.checkpoint.step.references import UNKNOWN, References
from swift_ft.torch_core.tensors import same_bits

GENERATOR = "swift_ft.generator"
"""The key of a generator's state."""
_MOST_BYTES = 2**26
_MOST_OF_HISTORY = 2**14


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
        if len(value) > MOST_ELEMENTS and not _is_history(value):
            return UNKNOWN
        if isinstance(value, bytearray):
            return bytearray(value)
        inner = []
        for element in value.values() if isinstance(value, dict) else value:
            if (copied := self.copy(element)) is UNKNOWN:
                return UNKNOWN
            inner.append(copied)
        if isinstance(value, dict):
            keys = [*map(self._references.of_key, value)]
            unknown = any(key is UNKNOWN for key in keys)
            return UNKNOWN if unknown else dict(zip(keys, inner, strict=True))
        if isinstance(value, set) and not all(map(is_fixed, value)):
            return UNKNOWN  # it would have others in itself
        if isinstance(value, deque):
            return deque(inner, value.maxlen)
        plain: type = next(kind for kind in (list, tuple, set) if isinstance(value, kind))
        return plain(inner)


def frozen(value: Any) -> Any:
    """A copy of one value."""
    return Copier().copy(value)


def _copy_of_tensor(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    if type(tensor) is nn.Parameter:
        return nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


def _is_history(value: Any) -> bool:
    """Whether it is a list of plain values, as of losses, which is short enough to travel."""
    plain = isinstance(value, list) and len(value) <= _MOST_OF_HISTORY
    return plain and is_plain(value)


def is_plain(elements: Iterable[Any]) -> bool:
    """Whether all of them are of the most common types of values that never change in themselves."""
    return FIXED_EXACTLY.issuperset(map(type, elements))


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
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other)
    return bool(one == other)
