"""The parameter groups of optimizers at the beginning of a step: rates, decay, momentum, which groups exist.

A script changes them anywhere: in `with step:`, at the top of the loop, in a scheduler after the block. A
scheduler's own ``load_state_dict()`` puts back what it counts, and not the rates that it has set.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class HyperParameters:
    """The groups of some optimizers at one moment.

    Args:
        optimizers: whose groups are copied. Parameters are held by reference.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._groups = [
            (optimizer, [_Group(group) for group in optimizer.param_groups]) for optimizer in optimizers
        ]

    def put_back(self) -> None:
        """Each optimizer has the groups that it had, with the values that they had."""
        for optimizer, groups in self._groups:
            optimizer.param_groups[:] = [group.put_back() for group in groups]


class _Group:
    """One parameter group and its values.

    Tensors (rates of a compiled or captured step) get their values back in place: others hold on to them.
    """

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        self._values = {key: _copy(value) for key, value in group.items()}

    def put_back(self) -> dict[str, Any]:
        group = self._group
        for key in [key for key in group if key not in self._values]:
            del group[key]
        for key, (value, copied) in self._values.items():
            if isinstance(value, torch.Tensor):
                with torch.no_grad():
                    value.copy_(copied)
                group[key] = value
            elif isinstance(value, list):
                value[:] = copied
                group[key] = value
            else:
                group[key] = copy.copy(copied)
        return group


def _copy(value: Any) -> tuple[Any, Any]:
    """A value and its copy. Of a list of parameters the list is new, and the parameters are the same."""
    if isinstance(value, torch.Tensor):
        return value, value.detach().clone()
    if isinstance(value, list | tuple | dict | set):
        return value, copy.copy(value)
    return value, value
