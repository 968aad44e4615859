"""Loading an optimizer without losing what others hold of it: groups and state stay the same dictionaries.

torch's ``load_state_dict()`` gives an optimizer new dictionaries, and refuses other numbers of groups or
parameters. A script may have added a group at some iteration, and may hold one (``group["lr"] = ...``).
Another optimizer may share the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from swift_ft.errors import TopologyMismatchError


def fit_groups(
    name: str,
    optimizer: Optimizer,
    saved: Sequence[Mapping[str, Any]],
    parameters: Sequence[nn.Parameter | None],
) -> None:
    """Give an optimizer the groups that it had when it was saved, if it has others.

    Args:
        name: what an error calls the optimizer.
        saved: the groups of its ``state_dict()``.
        parameters: which it held then, in their order; None for one that this process does not know.

    Raises:
        TopologyMismatchError: it held parameters that this process does not know.
    """
    groups = optimizer.param_groups
    sizes = [len(group["params"]) for group in saved]
    if sizes == [len(group["params"]) for group in groups]:
        return
    if len(parameters) != sum(sizes) or any(parameter is None for parameter in parameters):
        raise TopologyMismatchError(
            f"{name} had groups of {sizes} parameters when it was saved, and has groups of "
            f"{[len(group['params']) for group in groups]} here: make it as it was, or put all modules whose "
            "parameters a later add_param_group() gives it into Session(state)."
        )
    rest = list(parameters)
    for number, size in enumerate(sizes):
        if number == len(groups):
            groups.append({**optimizer.defaults})
        groups[number]["params"], rest = rest[:size], rest[size:]
    del groups[len(sizes) :]
    held = {*parameters}
    for parameter in [parameter for parameter in optimizer.state if parameter not in held]:
        del optimizer.state[parameter]


def load_optimizer(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """As ``load_state_dict()``, into the same groups and the same state.

    Args:
        optimizer: with groups of the same sizes.
        state_dict: what ``state_dict()`` returned.
    """
    groups, inside, state = optimizer.param_groups, [*optimizer.param_groups], optimizer.state
    rates = [{k: v for k, v in group.items() if isinstance(v, torch.Tensor)} for group in inside]
    optimizer.load_state_dict(state_dict)
    for group, own, values in zip(inside, rates, optimizer.param_groups, strict=True):
        group.clear()
        group.update(values)
        for key, tensor in own.items():
            value = group.get(key)
            if (
                isinstance(value, torch.Tensor)
                and value.shape == tensor.shape
                and value.dtype == tensor.dtype
            ):
                with torch.no_grad():
                    tensor.copy_(value)
                group[key] = tensor
    loaded_groups, loaded_state = optimizer.param_groups, optimizer.state
    groups[:] = inside
    if loaded_state is not state:
        state.clear()
        state.update(loaded_state)
    for holder in (optimizer, *(value for value in vars(optimizer).values() if isinstance(value, Optimizer))):
        if holder.param_groups is loaded_groups:  # the optimizer itself, and one that it stands for
            holder.param_groups = groups
        if holder.state is loaded_state:
            holder.state = state
