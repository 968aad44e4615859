"""Loading an optimizer without losing what others hold of it: groups and state stay the same dictionaries.

torch's ``load_state_dict()`` gives an optimizer new dictionaries, and refuses other numbers of groups or
parameters. A script may have added a group at some iteration, and may hold one (``group["lr"] = ...``).
Another optimizer may share the state.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from swift_ft.checkpoint.given_values import give_back, loads_as_torch, to_torch
from swift_ft.errors import TopologyMismatchError
from swift_ft.torch_core.tensors import same_values

Options = Mapping[str, Any]
"""Of a group, all but its parameters: a learning rate, as a scheduler has set it, a weight decay."""


@dataclass(frozen=True, slots=True)
class InGroup:
    """A parameter's place in an optimizer of another worker.

    Attributes:
        number: of the group that it is in there.
        groups: the options of all groups of that optimizer.
    """

    number: int
    groups: Sequence[Options]

    @property
    def options(self) -> Options:
        """Of its group."""
        return self.groups[self.number]


def options_of(groups: Sequence[Mapping[str, Any]]) -> list[Options]:
    """The options of an optimizer's groups, or of those in its ``state_dict()``."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def numbers_here(name: str, here: Sequence[Options], arrived: Mapping[str, InGroup]) -> dict[str, int]:
    """The groups for parameters that come to an optimizer which stays as it is.

    Args:
        name: what an error calls the optimizer.
        here: the options of its groups.
        arrived: by the name of the parameter.

    Returns:
        By the name of the parameter, a group with the options of the one that it was in: of the same number
        if there is such a one.

    Raises:
        TopologyMismatchError: there is none.
    """
    found = {}
    for parameter, one in arrived.items():
        numbers = [one.number, *range(len(here))]
        fitting = (n for n in numbers if n < len(here) and same_values(here[n], one.options))
        if (number := next(fitting, None)) is None:
            raise TopologyMismatchError(_no_such_group(name, here, parameter, one), key=parameter)
        found[parameter] = number
    return found


def _no_such_group(name: str, here: Sequence[Options], parameter: str, one: InGroup) -> str:
    there = one.options
    like: Options = here[one.number] if one.number < len(here) else {}
    key = next((key for key in there if not same_values(there[key], like.get(key))), "lr")
    return (
        f"{name} has {parameter} in a group whose {key} is {there.get(key)}, and no group with these options "
        f"where the layer is to go (group {one.number} has {like.get(key)}): layers can move if all workers "
        "make the same groups"
    )


def groups_here(
    name: str,
    here: Sequence[Options],
    now: Mapping[str, int],
    arrived: Mapping[str, InGroup],
    own: Sequence[Options],
    *,
    by_number: bool = False,
) -> tuple[dict[str, int], list[Options]]:
    """The groups of parameters whose whole state comes from others, and the options of these groups.

    Where all have the same groups, a number means the same everywhere. Otherwise the script has made groups
    for what it has here, and each gets the options of its own parameters.

    Args:
        name: what an error calls the optimizer.
        here: the options of its groups, as they are.
        now: the groups of its parameters, as they are, by the name of the parameter.
        arrived: by the name of the parameter.
        own: the options of the groups where this worker's place was, or a similar one's.
        by_number: the state of a scheduler has a rate for each group, by its number.

    Raises:
        TopologyMismatchError: parameters of one group here had unlike options there, no group is like the one
            that a parameter was in, or a scheduler has the rates of other groups.
    """
    if len(own) == len(here) and all(
        one.number < len(own) and same_values(own[one.number], one.options) for one in arrived.values()
    ):
        return {parameter: one.number for parameter, one in arrived.items()}, [*own]
    if by_number:
        raise TopologyMismatchError(
            f"{name} has other groups of parameters where its layers come from, and its scheduler has a rate "
            "for each of them, by number: make the same groups on all workers, or have the same layers here",
            key=name,
        )
    options: dict[int, Options] = {}
    for parameter, one in arrived.items():
        number = now.get(parameter)
        if number is not None and not same_values(options.setdefault(number, one.options), one.options):
            raise TopologyMismatchError(_no_such_group(name, options_of(here), parameter, one), key=parameter)
    filled = [options.get(number, there) for number, there in enumerate(here)]
    known = {parameter: now[parameter] for parameter in arrived if parameter in now}
    others = {parameter: one for parameter, one in arrived.items() if parameter not in now}
    return known | numbers_here(name, filled, others), filled


def set_options(optimizer: Optimizer, options: Sequence[Options]) -> None:
    """Give an optimizer's groups other options. Tensors that somebody may hold stay the same tensors."""
    for group, values in zip(optimizer.param_groups, options, strict=True):
        tensors = {key: value for key, value in group.items() if isinstance(value, torch.Tensor)}
        group.update(values)
        _keep_tensors(group, tensors)


def fit_groups(
    name: str,
    optimizer: Optimizer,
    saved: Sequence[Mapping[str, Any]],
    parameters: Sequence[nn.Parameter | None],
) -> None:
    """Give an optimizer the groups that it had when it was saved, if it has others.

    Groups of the same sizes may hold other parameters: a script that trains one block after another gives the
    optimizer each one's in turn.

    Args:
        name: what an error calls the optimizer.
        saved: the groups of its ``state_dict()``.
        parameters: which it held then, in their order; None for one that this process does not know. Empty
            if it holds the same here.

    Raises:
        TopologyMismatchError: it held parameters that this process does not know.
    """
    groups = optimizer.param_groups
    sizes = [len(group["params"]) for group in saved]
    if sizes == [len(group["params"]) for group in groups]:
        now = [parameter for group in groups for parameter in group["params"]]
        pairs = zip_longest(now, parameters[: len(now)])
        parameters = [here if there is None else there for here, there in pairs]
        if all(map(operator.is_, parameters, now)):
            return
    if len({*map(id, parameters)}) != sum(sizes) or any(parameter is None for parameter in parameters):
        raise TopologyMismatchError(
            f"{name} had groups of {sizes} parameters when it was saved, and has groups of "
            f"{[len(group['params']) for group in groups]} here: make it as it was, or put all modules whose "
            "parameters a later add_param_group() gives it into Session(state)."
        )
    rest = list(parameters)
    for number, size in enumerate(sizes):
        if number == len(groups):
            groups.append(_new_group(optimizer, saved[number]))
        groups[number]["params"], rest = rest[:size], rest[size:]
    del groups[len(sizes) :]
    held = {*parameters}
    for parameter in [parameter for parameter in optimizer.state if parameter not in held]:
        del optimizer.state[parameter]


def _new_group(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """A group without parameters: its options in their order, those of the defaults the same objects."""
    defaults, (options,) = _defaults(optimizer), options_of([saved])
    return {
        "params": [],
        **{key: defaults[key] if _has(defaults, key, value) else value for key, value in options.items()},
    }


def _has(values: Mapping[str, Any], key: str, value: Any) -> bool:
    return key in values and same_values(values[key], value)


def _defaults(optimizer: Optimizer) -> dict[str, Any]:
    """The options of groups that say nothing of them; none of a wrapper that calls no constructor."""
    defaults = getattr(optimizer, "defaults", None)
    return defaults if isinstance(defaults, dict) else {}


def load_optimizer(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """As ``load_state_dict()``, into the same groups and the same state. Values stay as they are given.

    Args:
        optimizer: with groups of the same sizes.
        state_dict: what ``state_dict()`` returned.
    """
    groups, inside, state = optimizer.param_groups, [*optimizer.param_groups], optimizer.state
    # The optimizer itself, and those that it may stand for: a load may change either, or both.
    holders = [optimizer, *(one for one in vars(optimizer).values() if isinstance(one, Optimizer))]
    of_groups = [one for one in holders if one.param_groups is groups]
    of_state = [one for one in holders if one.state is state]
    rates = [{k: v for k, v in group.items() if isinstance(v, torch.Tensor)} for group in inside]
    defaults = {*_defaults(optimizer)}
    if loads_as_torch(optimizer):
        optimizer.load_state_dict({**state_dict, "state": to_torch(state_dict["state"])})
        give_back(optimizer, state_dict)
    else:
        optimizer.load_state_dict(state_dict)
    loaded_groups = next((one.param_groups for one in of_groups if one.param_groups is not groups), groups)
    loaded_state = next((one.state for one in of_state if one.state is not state), state)
    for group, own, values in zip(inside, rates, loaded_groups, strict=True):
        _set_values(group, values)
        _keep_tensors(group, own)
    now = _defaults(optimizer)
    for key in now.keys() - defaults:  # torch adds one to those of older classes
        del now[key]
    groups[:] = inside
    if loaded_state is not state:
        state.clear()
        state.update(loaded_state)
    for holder in holders:
        if holder in of_groups or holder.param_groups is loaded_groups:
            holder.param_groups = groups
        if holder in of_state or holder.state is loaded_state:
            holder.state = state


def _set_values(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Give a group other values, in its own order: torch puts the parameters last.

    A tuple or a text that is as before stays the same one, which other groups and the defaults have as well.
    """
    before, values, keys = dict(group), dict(values), [*group, *values]  # a load may keep the group
    group.clear()
    for key in keys:
        if key in values:
            here, value = before.get(key), values[key]
            stays = isinstance(here, tuple | str | bytes) and same_values(here, value)
            group[key] = here if stays else value


def _keep_tensors(group: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Have a group's values in the tensors that it had before, where they fit."""
    for key, tensor in tensors.items():
        value = group.get(key)
        if isinstance(value, torch.Tensor) and value.shape == tensor.shape and value.dtype == tensor.dtype:
            with torch.no_grad():
                tensor.copy_(value)
            group[key] = tensor
