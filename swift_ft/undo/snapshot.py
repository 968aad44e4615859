"""Copies of values that cannot be inverted, held while the undo window is open."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from swift_ft.torch_core.optimizers import parameters_of
from swift_ft.torch_core.tensors import parts_bytes, parts_of


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A tensor and a copy of its values."""

    tensor: Tensor
    value: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Snapshot:
        """Copies a tensor of any layout."""
        return cls(tensor, tensor.detach().clone())

    def restore(self) -> None:
        """Writes the copy back."""
        # a detached sparse tensor has indices of its own
        (self.tensor if self.tensor.is_sparse else self.tensor.detach()).copy_(self.value)

    @property
    def size_bytes(self) -> int:
        """Bytes of the copy."""
        return size_bytes(self.value)


@dataclass(frozen=True, slots=True)
class RowSnapshot:
    """Some rows of a tensor and a copy of their values; the step does not touch the other rows."""

    tensor: Tensor
    rows: Tensor
    value: Tensor

    @classmethod
    def of(cls, tensor: Tensor, rows: Tensor) -> RowSnapshot:
        """Copies rows, given by their distinct indices in the first dimension."""
        return cls(tensor, rows, tensor.detach().index_select(0, rows))

    def restore(self) -> None:
        """Writes the copy back."""
        self.tensor.detach().index_copy_(0, self.rows, self.value)

    @property
    def size_bytes(self) -> int:
        """Bytes of the copy and of the indices."""
        return size_bytes(self.value) + size_bytes(self.rows)


@dataclass(frozen=True, slots=True)
class PartCopy:
    """A tensor and a copy of the part of it that this worker has, in memory that is kept."""

    tensor: Tensor
    value: Tensor

    def restore(self) -> None:
        """Writes the copy back, into the part as it is now."""
        (part,) = parts_of([self.tensor])
        part.detach().copy_(self.value)

    @property
    def size_bytes(self) -> int:
        """Bytes of the copy."""
        return size_bytes(self.value)


AnySnapshot = Snapshot | RowSnapshot | PartCopy


def size_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's values, of all its parts if it is sparse."""
    return parts_bytes(tensor) if tensor.is_sparse else tensor.numel() * tensor.element_size()


class Hyper:
    """A parameter group's hyper-parameters as a step used them; schedulers change them later.

    Args:
        group: the parameter group, just before the step.
    """

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        self._tree = {key: _snapshots(value) for key, value in group.items() if key != "params"}
        self.values: Mapping[str, Any] = {key: _value(value) for key, value in self._tree.items()}

    def restore(self) -> None:
        """Restores the group's values; the parameters stay as they are."""
        for key in [key for key in self._group if key != "params" and key not in self._tree]:
            del self._group[key]
        for key, value in self._tree.items():
            self._group[key] = _restore(value)


class WholeState:
    """Everything that an optimizer holds: of one without a rule, or whose step hooks change things.

    Args:
        optimizer: the optimizer, before its step.
        ignored: names of its attributes that are not its own.
    """

    def __init__(self, optimizer: Optimizer, ignored: frozenset[str]) -> None:
        self._optimizer = optimizer
        self.params = parameters_of(optimizer)
        self._values = [Snapshot.of(param) for param in self.params]
        self._groups = [Hyper(group) for group in optimizer.param_groups]
        self._state = {key: _snapshots(value) for key, value in optimizer.state.items()}
        skipped = ignored | {"state", "param_groups", "defaults"}
        self._attributes = {
            name: _snapshots(value)
            for name, value in vars(optimizer).items()
            if name not in skipped and _is_plain(value)
        }

    def restore(self) -> None:
        """Restores the optimizer and its parameters."""
        for value in self._values:
            value.restore()
        for hyper in self._groups:
            hyper.restore()
        for key in [key for key in self._optimizer.state if key not in self._state]:
            del self._optimizer.state[key]
        for key, value in self._state.items():
            self._optimizer.state[key] = _restore(value)
        for name, value in self._attributes.items():
            setattr(self._optimizer, name, _restore(value))

    @property
    def size_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(value.size_bytes for value in self._values) + _tree_bytes(
            [*self._state.values(), *self._attributes.values()]
        )


def _snapshots(value: Any) -> Any:
    """The same tree with a copy beside each tensor."""
    if isinstance(value, Tensor):
        return Snapshot.of(value)
    if isinstance(value, dict):
        return {key: _snapshots(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_snapshots(item) for item in value)
    return copy.copy(value)


def _restore(tree: Any) -> Any:
    """The tree as it was, with the same tensors holding their old values."""
    if isinstance(tree, Snapshot):
        tree.restore()
        return tree.tensor
    if isinstance(tree, dict):
        return {key: _restore(item) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_restore(item) for item in tree)
    return copy.copy(tree)


def _value(tree: Any) -> Any:
    """The tree as it was, with the copies in place of the tensors."""
    if isinstance(tree, Snapshot):
        return tree.value
    if type(tree) in (list, tuple):
        return type(tree)(_value(item) for item in tree)
    return tree


def _is_plain(value: Any) -> bool:
    """Whether a value is plain data, not code or another object with a state of its own."""
    if isinstance(value, dict):
        return type(value) is dict and all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, Tensor, torch.dtype))


def _tree_bytes(tree: Any) -> int:
    if isinstance(tree, Snapshot):
        return tree.size_bytes
    if isinstance(tree, dict):
        return sum(map(_tree_bytes, tree.values()))
    return sum(map(_tree_bytes, tree)) if type(tree) in (list, tuple) else 0
