"""Ranges of a large parameter, to which an optimizer is applied one after the other.

A step, the copies before it and the inverse behind it take longer from memory than from a cache. So an
elementwise optimizer is applied to a range of a cache's size, which is inverted before the next range. A
range is a parameter of its own to the optimizer, with views of the gradient and of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from swift_ft.undo.rules.rule import Rule
from swift_ft.undo.slices import slice_elements
from swift_ft.undo.update import ParamUpdate


def can_be_cut(rule: Rule, entry: ParamUpdate) -> bool:
    """Whether ranges of a parameter can be updated, and are worth it: on a CPU, and larger than a slice."""
    param, grad = entry.param, entry.grad
    size = param.numel()
    if param.device.type != "cpu" or size <= slice_elements(param.device):
        return False
    if not rule.elementwise or entry.fresh or entry.fully_journaled or hasattr(param, "_local_tensor"):
        return False
    state = [value for value in (entry.state or {}).values() if isinstance(value, Tensor)]
    if not all(value.is_contiguous() and value.is_floating_point() for value in (param, grad, *state)):
        return False
    return grad.numel() == size and all(value.numel() in (1, size) for value in state)


def ranges_of(entry: ParamUpdate) -> Iterator[slice]:
    """The ranges of a parameter, in order."""
    size, limit = entry.param.numel(), slice_elements(entry.param.device)
    for at in range(0, size, limit):
        yield slice(at, min(at + limit, size))


def counters_of(entry: ParamUpdate) -> dict[str, Tensor]:
    """Copies of the step counter and of other single numbers in a parameter's state, before the step."""
    return {
        key: value.clone()
        for key, value in (entry.state or {}).items()
        if isinstance(value, Tensor) and value.numel() == 1
    }


def step_range(
    optimizer: Optimizer,
    entry: ParamUpdate,
    within: slice,
    counters: dict[str, Tensor],
    step: Callable[[Sequence[Tensor]], None],
) -> None:
    """Steps one range of a parameter. The first one advances the parameter's own counters.

    Args:
        optimizer: the parameter's.
        entry: a parameter that :func:`can_be_cut`.
        within: the range.
        counters: those before the step.
        step: applies the optimizer to some parameters.
    """
    param = _view(entry.param, within)
    param.grad = _view(entry.grad, within)
    first = within.start == 0
    held: dict[str, Any] = {}
    for key, value in (entry.state or {}).items():
        if key in counters:
            held[key] = value if first else counters[key].clone()
        else:
            held[key] = _view(value, within) if isinstance(value, Tensor) else value
    given = dict(held)
    optimizer.state[param] = held
    try:
        step([param])
    finally:
        held = optimizer.state.pop(param)
    for key, value in held.items():
        if isinstance(given.get(key), Tensor) and key not in counters:
            if value is not given[key]:
                given[key].copy_(value)
        elif first:
            optimizer.state[entry.param][key] = value


def _view(tensor: Tensor, within: slice) -> Tensor:
    return tensor.detach().view(-1)[within]
