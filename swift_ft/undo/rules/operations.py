"""Operations that several rules share, on lists of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swift_ft.undo.rules.rule import Tensors


def directed(grads: list[Tensor], sign: float) -> list[Tensor]:
    """Gradients as the update uses them: negated copies where it maximizes."""
    return list(torch._foreach_neg(grads)) if sign < 0 else grads


def corrections(beta: float, tensors: Tensors, hyper: Mapping[str, Any]) -> list[float]:
    """The bias corrections ``1 - beta ** step``, with the kernel's rounding.

    A capturable kernel computes them on the device in float32. In the first steps few correct digits are
    left: about 4 decimals of ``1 - 0.999``.
    """
    if not hyper.get("capturable"):
        return [1 - beta**step for step in tensors.steps]
    steps = torch.tensor(tensors.steps, dtype=torch.float32, device=tensors.params[0].device)
    return [float(value) for value in (1 - torch.pow(beta, steps)).tolist()]


def decayed(grads: list[Tensor], params: list[Tensor], weight_decay: float) -> list[Tensor]:
    """Gradients plus the coupled weight decay of the parameters before the step."""
    if weight_decay == 0:
        return grads
    return list(torch._foreach_add(grads, params, alpha=weight_decay))


def undo_decay(params: list[Tensor], factor: float) -> None:
    """Inverts ``param *= factor``."""
    if factor != 1:
        torch._foreach_div_(params, factor)


def undo_lerp(averages: list[Tensor], values: Sequence[Tensor], weight: float) -> None:
    """Inverts ``average = average + weight * (value - average)``."""
    torch._foreach_add_(averages, list(values), alpha=-weight)
    torch._foreach_div_(averages, 1 - weight)


def undo_square(averages: list[Tensor], values: list[Tensor], beta: float, weight: float) -> None:
    """Inverts ``average = beta * average + weight * value**2``; the result is never negative."""
    torch._foreach_addcmul_(averages, values, values, -weight)
    if beta != 1:
        torch._foreach_div_(averages, beta)
    torch._foreach_clamp_min_(averages, 0.0)  # after rounding, no square root must see a negative number
