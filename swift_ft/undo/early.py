"""Updates made within a backward pass: all that they have used must be the same when ``step()`` is called."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from swift_ft.torch_core.tensors import same_bits, same_values, sparse_values, version_of
from swift_ft.undo.snapshot import Hyper

_SAMPLED = 8
"""Gradients that are compared by value: a GradScaler unscales all, and past torch's count of changes."""
_ELEMENTS = 1024
"""Of each of them."""
_GRADIENTS = "their gradients have changed since, as clipping or a GradScaler does it"


class EarlyUpdates:
    """The gradients and options of parameters that are updated already, as their backward pass has left them.

    Args:
        groups: all groups of the optimizer.
        updated: the parameters.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], updated: Collection[Tensor]) -> None:
        self._gradients = {parameter: (parameter.grad, _version(parameter)) for parameter in updated}
        self._samples = [(gradient, _beginning(gradient).clone()) for gradient in self._smallest()]
        self._options = [
            (group, Hyper(group).values)
            for group in groups
            if any(parameter in self._gradients for parameter in group["params"])
        ]

    def changed(self, optimizer: Optimizer, updated: Collection[Tensor]) -> str | None:
        """Describe what ``step()`` would use and the updates have not; None if there is nothing.

        Args:
            optimizer: as its ``step()`` begins.
            updated: parameters whose updates still count.
        """
        if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            return "a GradScaler scales their gradients"
        for parameter, (gradient, version) in self._gradients.items():
            is_same = parameter.grad is gradient and _version(parameter) == version
            if parameter in updated and not is_same:
                return _GRADIENTS
        if any(not same_bits(_beginning(gradient), before) for gradient, before in self._samples):
            return _GRADIENTS
        for group, options in self._options:
            for name in _read_by(optimizer, options.keys() | group.keys()):
                if not same_values(options.get(name), group.get(name), incomparable=True):
                    return f"{name!r} of their group has changed since"
        return None

    def _smallest(self) -> list[Tensor]:
        gradients = (gradient for gradient, _ in self._gradients.values() if gradient is not None)
        return heapq.nsmallest(_SAMPLED, gradients, key=Tensor.numel)


def _read_by(optimizer: Optimizer, names: Collection[str]) -> Iterable[str]:
    """The options that a step may read: a script may keep others in a group of an optimizer of torch's."""
    kind: type = getattr(optimizer, "_plain_class", type(optimizer))
    if kind.__module__.startswith(("torch.optim.", "swift_ft.")):
        return optimizer.defaults
    return (name for name in names if name != "params")


def _beginning(gradient: Tensor) -> Tensor:
    """The first values of a gradient, of shape (values,)."""
    values = sparse_values(gradient.detach()) if gradient.layout is torch.sparse_coo else gradient.detach()
    return values.reshape(-1)[:_ELEMENTS]


def _version(parameter: Tensor) -> int:
    return 0 if parameter.grad is None else version_of(parameter.grad)
