"""Values of an optimizer's state as they were given. torch's ``load_state_dict()`` makes others of some.

torch gives each tensor but ``step`` the dtype of its parameter, if that has floating point, and makes each
container from a generator again: a text becomes the generator's name, a ``deque`` loses its ``maxlen``.
"""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from swift_ft.optim import UndoableOptimizer
from swift_ft.torch_core.optimizers import parameters_of

_REBUILT = (list, tuple)
"""Containers of which torch makes others that are alike."""


class _Held:
    """A value that torch passes on, since torch takes it for no container."""

    def __init__(self, value: Any) -> None:
        self.value = value


def loads_as_torch(optimizer: Optimizer) -> bool:
    """Whether torch's own ``load_state_dict()`` loads a state. Another one may mean to change values."""
    own = (base for base in type(optimizer).__mro__ if "load_state_dict" in vars(base))
    return next(base for base in own if base is not UndoableOptimizer) is Optimizer


def to_torch(state: Mapping[Any, Mapping[Any, Any]]) -> dict[Any, dict[Any, Any]]:
    """A state for torch's ``load_state_dict()``, which can make all of it. :func:`give_back` follows."""
    return {
        of: {key: value if _can_be_rebuilt(value) else _Held(value) for key, value in fields.items()}
        for of, fields in state.items()
    }


def give_back(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """After torch's ``load_state_dict()``: put the values that it has changed in place as they were given.

    Args:
        optimizer: it has loaded the state.
        state_dict: what was given, before :func:`to_torch`.
    """
    numbers = (number for group in state_dict["param_groups"] for number in group["params"])
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=True):
        loaded = optimizer.state.get(parameter, {})
        for key, value in state_dict["state"].get(number, {}).items():
            if key not in loaded:
                continue
            if not isinstance(value, torch.Tensor):
                if isinstance(value, Iterable):
                    loaded[key] = _moved(value, parameter.device)
            elif isinstance(loaded[key], torch.Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)


def _can_be_rebuilt(value: Any) -> bool:
    if type(value) in _REBUILT:
        return all(map(_can_be_rebuilt, value))
    if type(value) is dict:
        return all(map(_can_be_rebuilt, value.values()))
    return isinstance(value, torch.Tensor) or not isinstance(value, Iterable)


def _moved(value: Any, device: torch.device) -> Any:
    """The same with all tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        moved = copy.copy(value)
        moved.update((key, _moved(item, device)) for key, item in value.items())
        return moved
    if isinstance(value, list | deque):
        changed = copy.copy(value)
        for place, item in enumerate(value):
            changed[place] = _moved(item, device)
        return changed
    if isinstance(value, tuple):
        items = [_moved(item, device) for item in value]
        if all(map(operator.is_, items, value)):
            return value  # a torch.Size, for one, which has a way of its own to be made
        return tuple.__new__(type(value), items)
    return value
