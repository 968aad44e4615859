"""Adafactor: the factored statistics are journaled, the parameter is inverted by algebra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from swift_ft.undo.rules.operations import undo_decay
from swift_ft.undo.rules.rule import PARAM, Rule, Tensors, is_lost, number, signed

_STATISTICS = ("row_var", "col_var", "variance")


class AdafactorRule(Rule):
    """Inverts :class:`torch.optim.Adafactor`.

    The step scales with the norm of the parameter before it. That one number is noted (§4 does the same for
    LAMB). The first step overwrites the statistics, so they have no inverse. Factored, they are small, and so
    they are journaled.
    """

    error: ClassVar[str] = "up to 1 ulp"
    keys: ClassVar[tuple[str, ...]] = _STATISTICS
    shardable: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False

    def makes(self, key: str, hyper: Mapping[str, Any]) -> bool:
        """None: they depend on the parameter's shape."""
        return False

    def sizes(self, param: Tensor) -> dict[str, int]:
        """Rows and columns of a matrix, or the variance of a vector."""
        size = param.element_size()
        if param.dim() < 2:
            return {"variance": param.numel() * size}
        return {
            "row_var": param.numel() // max(param.shape[-1], 1) * size,
            "col_var": param.numel() // max(param.shape[-2], 1) * size,
        }

    def journaled(self, hyper: Mapping[str, Any], exact: bool) -> frozenset[str]:
        """The statistics, and the parameter if its decay factor is nearly 0."""
        lost = is_lost(1 - number(hyper["lr"]) * number(hyper["weight_decay"]))
        return frozenset({*_STATISTICS, PARAM} if lost else _STATISTICS)

    def note(self, param: Tensor, state: Mapping[str, Any], hyper: Mapping[str, Any]) -> dict[str, Any]:
        """The parameter's norm."""
        return {"norm": float(param.detach().norm(2))}

    def invert(self, tensors: Tensors, hyper: Mapping[str, Any]) -> None:
        """See :meth:`Rule.invert`."""
        if PARAM in tensors.journaled:
            return
        lr = number(hyper["lr"])
        for index, (param, grad) in enumerate(zip(tensors.params, tensors.grads, strict=True)):
            state = {key: values[index] for key, values in tensors.state.items()}
            update = _update(state, grad, number(hyper["eps"][0] or torch.finfo(param.dtype).eps))
            size = max(number(hyper["eps"][1]), tensors.notes[index]["norm"] / param.numel() ** 0.5) * min(
                lr, tensors.steps[index] ** -0.5
            )
            clip = max(1.0, float(update.norm(2)) / (update.numel() ** 0.5 * number(hyper["d"])))
            param.add_(update, alpha=signed(hyper) * size / clip)
            undo_decay([param], 1 - lr * number(hyper["weight_decay"]))


def _update(state: Mapping[str, Tensor], grad: Tensor, eps: float) -> Tensor:
    """The gradient over the root of its estimated variance."""
    if "row_var" in state:
        row = state["row_var"]
        estimate = (row @ state["col_var"]).div_(row.mean(dim=-2, keepdim=True).clamp_(min=eps))
    else:
        estimate = state["variance"].clone()
    return estimate.clamp_(min=eps * eps).rsqrt_().mul_(grad)
