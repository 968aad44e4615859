"""Copies of what optimizers keep, and how they are put back into what there is.

Not only tensors by the name of a field: Shampoo keeps lists of them, others a dictionary or an object, which
an update changes in place as well.
"""

from __future__ import annotations

import sys
from collections.abc import Container
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from swift_ft.checkpoint.plain_classes import attributes
from swift_ft.checkpoint.step.containers import content_in
from swift_ft.checkpoint.step.kinds import (
    CONTAINERS,
    FIXED_EXACTLY,
    GENERATORS,
    HOLDERS,
    is_fixed,
    is_reference,
)
from swift_ft.checkpoint.step.leaves import Leaves
from swift_ft.optim import UndoableOptimizer
from swift_ft.torch_core.optimizers import parameters_of
from swift_ft.torch_core.shards import local
from swift_ft.torch_core.tensors import PLAIN
from swift_ft.undo.snapshot import Snapshot

_OF_OTHERS = sys.stdlib_module_names | {"torch"}
"""Packages whose objects stay as they are: iterators, locks, meshes of devices."""

_HISTORIES = ("old_dirs", "old_stps", "ro", "al")
"""Lists of L-BFGS, as many times as large as the model: it adds and removes tensors, and writes to none."""


class ValueCopies:
    """Values and all that is in them, however deep, at one moment.

    Args:
        but: values that are put back in other ways, by ``id()``.
    """

    def __init__(self, but: Container[int] = ()) -> None:
        self._but = but
        self._seen: dict[int, Any] = {}  # held, so that nothing else gets these numbers
        self._leaves = Leaves(any_length=True)
        self._tensors: list[Snapshot] = []  # whose bits only their own class can read
        self._objects: list[tuple[Any, dict[str, Any]]] = []

    def add(self, value: Any) -> None:
        """Copy a value now."""
        todo = [value]
        while todo:
            one = todo.pop()
            if type(one) in FIXED_EXACTLY or id(one) in self._seen or id(one) in self._but:
                continue
            self._seen[id(one)] = one
            if isinstance(one, torch.Tensor):
                self._add_tensor(one)
                continue
            if isinstance(one, tuple):
                todo.extend(one)
            elif isinstance(one, (*CONTAINERS, *GENERATORS, np.ndarray)):
                self._leaves.add(one, sys.maxsize)
                if isinstance(one, HOLDERS):
                    todo.extend(content_in(one))
            if _has_variables(one) and (held := attributes(one)):
                self._objects.append((one, held))
                todo.extend(held.values())

    def add_list(self, elements: list[Any]) -> None:
        """Copy which elements a list has, and not what is in them."""
        if id(elements) not in self._seen:
            self._seen[id(elements)] = elements
            self._leaves.add(elements, sys.maxsize)

    def put_back(self) -> None:
        """Each value is what it was, in itself: others may hold it."""
        for owner, held in self._objects:
            now = attributes(owner)
            for name in now.keys() - held.keys():
                object.__delattr__(owner, name)
            for name, value in held.items():
                if name not in now or now[name] is not value:
                    object.__setattr__(owner, name, value)  # a frozen dataclass refuses it otherwise
        for leaf in self._leaves:
            leaf.put_back()
        with torch.no_grad():
            for snapshot in self._tensors:
                snapshot.restore()

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.layout == torch.strided and type(local(tensor)) in PLAIN:
            # Leaves hold none that has its graph: another tensor has the same memory without it.
            self._leaves.add(tensor if tensor.grad_fn is None else tensor.detach(), sys.maxsize)
        else:
            self._tensors.append(Snapshot.of(tensor))


def _has_variables(value: Any) -> bool:
    """Whether it is an object whose variables an optimizer may change."""
    if isinstance(value, nn.Module | Optimizer) or is_fixed(value) or is_reference(value):
        return False
    home = type(value).__module__.partition(".")[0]
    return isinstance(value, SimpleNamespace) or home not in _OF_OTHERS


class EntryCopy:
    """All that an optimizer keeps of one parameter.

    Args:
        optimizer: whose state it is.
        parameter: the key.
        inner: what is in containers and objects of it goes there, and is put back from there.
    """

    def __init__(self, optimizer: Optimizer, parameter: torch.Tensor, inner: ValueCopies) -> None:
        self.optimizer = optimizer
        self._parameter = parameter
        self._fields: dict[str, Any] | None = optimizer.state.get(parameter)
        self._values = {**(self._fields or {})}
        # As a rule these are all that there is. To look into each takes three times as long.
        tensors = {name: value for name, value in self._values.items() if isinstance(value, torch.Tensor)}
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        of_lbfgs = self._values.keys() >= {*_HISTORIES[:3]}
        for name in self._values.keys() - tensors.keys():
            if of_lbfgs and name in _HISTORIES and type(self._values[name]) is list:
                inner.add_list(self._values[name])
            else:
                inner.add(self._values[name])

    @torch.no_grad()
    def put_back(self) -> None:
        """As it was, but for what is in containers; none if there was none."""
        if self._fields is None:
            self.optimizer.state.pop(self._parameter, None)
            return
        for tensor, value in self._tensors:
            tensor.copy_(value)
        self._fields.clear()
        self._fields.update(self._values)
        self.optimizer.state[self._parameter] = self._fields


class OptimizerCopy:
    """All that an optimizer keeps: of each parameter, and in its groups, whose list goes back by itself.

    Args:
        optimizer: before a step that may be put back after its update.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = optimizer.state
        parameters = {*map(id, parameters_of(optimizer))}
        self._copies = ValueCopies(parameters)
        self._copies.add(optimizer.state)
        for group in optimizer.param_groups:
            for key, value in group.items():
                if key != "params":
                    self._copies.add(value)
        self._windows = optimizer.windows_opened if isinstance(optimizer, UndoableOptimizer) else 0

    def forget_update(self) -> None:
        """An update that was made since needs no undo: parameters and state are put back."""
        if isinstance(self._optimizer, UndoableOptimizer) and self._optimizer.windows_opened != self._windows:
            self._optimizer.close_undo_window()

    def put_back(self) -> None:
        """As it was: what a step has made is gone, and a state that it has replaced is there again."""
        if self._optimizer.state is not self._state:
            self._optimizer.state = self._state
        self._copies.put_back()
