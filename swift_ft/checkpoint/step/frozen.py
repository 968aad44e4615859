"""Copies of a script's values that share nothing with them, and how they come back into what holds them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from swift_ft.checkpoint.step.kinds import (
    CONTAINERS,
    FIXED_EXACTLY,
    GENERATORS,
    MOST_ELEMENTS,
    is_copied,
    is_fixed,
    read_state,
    write_state,
)
from swift_ft.checkpoint.step.reach import MISSING
from swift_ft.torch_core.tensors import same_bits

UNKNOWN: Any = object()
"""In the place of a value that cannot be copied so."""
GENERATOR = "swift_ft.generator"
"""The key of a generator's state."""
_MOST_BYTES = 2**26
_MOST_OF_HISTORY = 2**14


def frozen(value: Any, is_protected: Callable[[torch.Tensor], bool] = lambda _: False) -> Any:
    """A copy that shares nothing with the value; a generator's state in its place."""
    if value is MISSING or is_fixed(value):
        return value
    if isinstance(value, torch.Tensor):
        may = is_copied(value, _MOST_BYTES) and not is_protected(value)
        return value.detach().clone() if may else UNKNOWN
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= _MOST_BYTES else UNKNOWN
    if isinstance(value, GENERATORS):
        return {GENERATOR: frozen(read_state(value))}
    if not isinstance(value, (tuple, *CONTAINERS)):
        return UNKNOWN
    if len(value) > MOST_ELEMENTS and not _is_history(value):
        return UNKNOWN
    if isinstance(value, bytearray):
        return bytearray(value)
    inner = [
        frozen(element, is_protected) for element in (value.values() if isinstance(value, dict) else value)
    ]
    if any(element is UNKNOWN for element in inner):
        return UNKNOWN
    if isinstance(value, dict):
        return dict(zip(value, inner, strict=True))
    plain: type = next(kind for kind in (list, tuple, set, deque) if isinstance(value, kind))
    return plain(inner)


def _is_history(value: Any) -> bool:
    """Whether it is a list of plain values, as of losses, which is short enough to travel."""
    plain = isinstance(value, list) and len(value) <= _MOST_OF_HISTORY
    return plain and all(type(element) in FIXED_EXACTLY for element in value)


def put_into(now: Any, value: Any) -> bool:
    """Put a value into what is in its place, which others hold. False if that is of another kind."""
    if isinstance(value, dict) and GENERATOR in value:
        if isinstance(now, GENERATORS):
            write_state(now, value[GENERATOR])
        return isinstance(now, GENERATORS)
    if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
        alike = now.shape == value.shape and now.dtype == value.dtype and not now.requires_grad
        if alike:
            now.copy_(value)
        return bool(alike)
    if isinstance(now, list) and isinstance(value, list):
        now[:] = frozen(value)
    elif isinstance(now, dict) and isinstance(value, dict):
        _fill(now, value)
    elif isinstance(now, set) and isinstance(value, set):
        now.clear()
        now.update(value)
    elif isinstance(now, deque) and isinstance(value, deque):
        now.clear()
        now.extend(frozen(value))
    else:
        return False
    return True


def _fill(now: dict[Any, Any], value: dict[Any, Any]) -> None:
    """Give a dictionary the content of another one.

    Containers in it stay those that there are, or are such as it makes itself: a ``defaultdict`` among them
    makes entries of its own, which a plain dictionary of the same content would not.
    """
    before = dict(now)
    now.clear()
    for key, inner in value.items():
        there = before.get(key, MISSING)
        if there is MISSING and isinstance(inner, CONTAINERS):
            there = now.default_factory() if isinstance(now, defaultdict) and now.default_factory else MISSING
        now[key] = there if isinstance(there, CONTAINERS) and put_into(there, inner) else frozen(inner)


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
