"""Previous values of what cannot be inverted, kept for as long as the undo window is open."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Hyper", "Kept", "Rows", "Saved", "WholeState", "size_bytes"]


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor and a copy of what was in it."""

    tensor: Tensor
    value: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Kept:
        """Copies a tensor of any layout."""
        return cls(tensor, tensor.detach().clone())

    def put_back(self) -> None:
        """Writes the copy over what is there now."""
        # a detached sparse tensor has indices of its own
        (self.tensor if self.tensor.is_sparse else self.tensor.detach()).copy_(self.value)

    @property
    def size_bytes(self) -> int:
        """Bytes of the copy."""
        return size_bytes(self.value)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a tensor and a copy of what was in them; the step leaves the other rows alone."""

    tensor: Tensor
    rows: Tensor
    value: Tensor

    @classmethod
    def of(cls, tensor: Tensor, rows: Tensor) -> Rows:
        """Copies rows, given by their distinct indices in the first dimension."""
        return cls(tensor, rows, tensor.detach().index_select(0, rows))

    def put_back(self) -> None:
        """Writes the copy over what is there now."""
        self.tensor.detach().index_copy_(0, self.rows, self.value)

    @property
    def size_bytes(self) -> int:
        """Bytes of the copy and of the indices."""
        return size_bytes(self.value) + size_bytes(self.rows)


Saved = Kept | Rows


def size_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's values, of all its parts if it is sparse."""
    if tensor.is_sparse:
        return size_bytes(tensor._values()) + size_bytes(tensor._indices())
    return tensor.numel() * tensor.element_size()


class Hyper:
    """A parameter group's values as a step used them: schedulers move on, in place if they are tensors.

    Args:
        group: the parameter group, just before the step.
    """

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        self._tree = {key: _kept(value) for key, value in group.items() if key != "params"}
        self.values: Mapping[str, Any] = {key: _value(value) for key, value in self._tree.items()}

    def put_back(self) -> None:
        """Gives the group these values again; the parameters stay as they are."""
        for key in [key for key in self._group if key != "params" and key not in self._tree]:
            del self._group[key]
        for key, value in self._tree.items():
            self._group[key] = _put_back(value)


class WholeState:
    """All that an optimizer holds, for those that we know nothing about.

    Args:
        optimizer: the optimizer, before its step.
        ignored: names of its attributes that are not its own.
    """

    def __init__(self, optimizer: Optimizer, ignored: frozenset[str]) -> None:
        self._optimizer = optimizer
        self.params = [param for group in optimizer.param_groups for param in group["params"]]
        self._values = [Kept.of(param) for param in self.params]
        self._groups = [Hyper(group) for group in optimizer.param_groups]
        self._state = {key: _kept(value) for key, value in optimizer.state.items()}
        skipped = ignored | {"state", "param_groups", "defaults"}
        self._attributes = {
            name: _kept(value)
            for name, value in vars(optimizer).items()
            if name not in skipped and _is_plain(value)
        }

    def put_back(self) -> None:
        """Makes the optimizer and its parameters what they were."""
        for value in self._values:
            value.put_back()
        for hyper in self._groups:
            hyper.put_back()
        for key in [key for key in self._optimizer.state if key not in self._state]:
            del self._optimizer.state[key]
        for key, value in self._state.items():
            self._optimizer.state[key] = _put_back(value)
        for name, value in self._attributes.items():
            setattr(self._optimizer, name, _put_back(value))

    @property
    def size_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(value.size_bytes for value in self._values) + _tree_bytes(
            [*self._state.values(), *self._attributes.values()]
        )


def _kept(value: Any) -> Any:
    """The same tree with a copy beside each tensor."""
    if isinstance(value, Tensor):
        return Kept.of(value)
    if isinstance(value, dict):
        return {key: _kept(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_kept(item) for item in value)
    return copy.copy(value)


def _put_back(tree: Any) -> Any:
    """The tree as it was, with the same tensors holding their old values."""
    if isinstance(tree, Kept):
        tree.put_back()
        return tree.tensor
    if isinstance(tree, dict):
        return {key: _put_back(item) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_put_back(item) for item in tree)
    return copy.copy(tree)


def _value(tree: Any) -> Any:
    """The tree as it was, with the copies in place of the tensors."""
    if isinstance(tree, Kept):
        return tree.value
    if type(tree) in (list, tuple):
        return type(tree)(_value(item) for item in tree)
    return tree


def _is_plain(value: Any) -> bool:
    """Whether a value is data, and not code or another object that has its own life."""
    if isinstance(value, dict):
        return type(value) is dict and all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, Tensor, torch.dtype))


def _tree_bytes(tree: Any) -> int:
    if isinstance(tree, Kept):
        return tree.size_bytes
    if isinstance(tree, dict):
        return sum(map(_tree_bytes, tree.values()))
    return sum(map(_tree_bytes, tree)) if type(tree) in (list, tuple) else 0
