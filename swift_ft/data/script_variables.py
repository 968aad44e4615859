"""A script's objects that make samples and batches, and what may change in their variables."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from swift_ft.checkpoint.step.containers import content_in
from swift_ft.checkpoint.step.held_by_libraries import passed_on
from swift_ft.checkpoint.step.kinds import CONTAINERS, GENERATORS, MOST_ELEMENTS, is_object
from swift_ft.checkpoint.step.namespaces import Namespace

_DEPTH = 3
"""Of containers in containers that are compared."""


def objects_from(*asked: Any) -> Iterator[Any]:
    """The objects of the script among these things and behind them, each once.

    They may be behind a ``Subset`` or a ``Compose``. Modules and optimizers are left out.
    """
    todo = deque(asked)
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


def contents_of(value: Any, depth: int = _DEPTH, *, whole: bool) -> Iterator[Any]:
    """All that may change in a value in place: itself and containers in it; whole: also what is in these."""
    yield value
    if depth and isinstance(value, CONTAINERS):
        for inner in _content_of(value):
            if isinstance(inner, CONTAINERS):
                yield from contents_of(inner, depth - 1, whole=whole)
            elif whole and isinstance(inner, (torch.Tensor, np.ndarray, *GENERATORS)):
                yield inner


def _content_of(container: Any) -> tuple[Any, ...]:
    if len(container) > MOST_ELEMENTS or isinstance(container, bytearray):
        return ()
    return tuple(container if isinstance(container, tuple) else content_in(container))
