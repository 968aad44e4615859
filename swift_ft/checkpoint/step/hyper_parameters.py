"""The parameter groups of optimizers at the beginning of a step: rates, decay, momentum, which groups exist.

A script changes them anywhere: in `with step:`, at the top of the loop, in a scheduler after the block. A
scheduler's own ``load_state_dict()`` puts back what it counts, and not the rates that it has set.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
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

    def put_into_present(self) -> None:
        """As :meth:`put_back`, into the groups that there are now, which the script may hold."""
        for optimizer, groups in self._groups:
            if [*map(_parameters, optimizer.param_groups)] == [group.parameters for group in groups]:
                put_values(optimizer, [group.values() for group in groups])
            else:
                optimizer.param_groups[:] = [group.put_back() for group in groups]

    def lacks(self, optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether an optimizer had not all of these parameters."""
        groups = next((groups for one, groups in self._groups if one is optimizer), [])
        held = {number for group in groups for number in group.parameters}
        return not held.issuperset(map(id, parameters))

    def values(self) -> list[list[dict[str, Any]]]:
        """Of each optimizer, the values of its groups, without parameters."""
        return [[group.values() for group in groups] for _, groups in self._groups]


class _Group:
    """One parameter group and its values.

    Tensors (rates of a compiled or captured step) get their values back in place: others hold on to them.
    """

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        self._values = {key: _copy(value) for key, value in group.items()}
        self.parameters = _parameters(group)

    def values(self) -> dict[str, Any]:
        return {key: copied for key, (_, copied) in self._values.items() if key != "params"}

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


def put_values(optimizer: Optimizer, values: Sequence[Mapping[str, Any]]) -> None:
    """Give an optimizer's groups other values, and remove the groups that have none.

    Args:
        optimizer: keeps the parameters of its groups.
        values: of each group, without parameters.
    """
    groups = optimizer.param_groups
    del groups[len(values) :]
    for group, others in zip(groups, values, strict=False):
        for key in group.keys() - others.keys() - {"params"}:
            del group[key]
        for key, value in others.items():
            now = group.get(key)
            if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor) and now.shape == value.shape:
                with torch.no_grad():
                    now.copy_(value)
            else:
                group[key] = copy.deepcopy(value)


def _parameters(group: Mapping[str, Any]) -> list[int]:
    return [id(parameter) for parameter in group["params"]]
