"""Muon: momentum, orthogonalized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from swift_ft.torch_core.optimizers import orthogonalized, orthogonalized_step_size
from swift_ft.undo.rules.operations import undo_decay, undo_lerp
from swift_ft.undo.rules.rule import PARAM, Rule, Tensors, is_lost, number

_BUFFER = "momentum_buffer"


class MuonRule(Rule):
    """Inverts :class:`torch.optim.Muon`: the orthogonalized update is computed again from the momentum."""

    error: ClassVar[str] = "up to 1 ulp; buffer 2 ulps / momentum"
    keys: ClassVar[tuple[str, ...]] = (_BUFFER,)
    shardable: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False

    def journaled_for(
        self, param: Tensor, state: Mapping[str, Any], hyper: Mapping[str, Any], exact: bool
    ) -> frozenset[str]:
        """Parts that were multiplied by a factor near 0, and a buffer that the step normalizes in place.

        Without Nesterov, torch orthogonalizes ``buffer.bfloat16()``. If the buffer is in bfloat16 already,
        that overwrites it.
        """
        lost = set()
        if is_lost(1 - number(hyper["lr"]) * number(hyper["weight_decay"])):
            lost.add(PARAM)
        if is_lost(number(hyper["momentum"])):
            lost.add(_BUFFER)
        if not hyper["nesterov"] and param.dtype is torch.bfloat16:
            lost |= {PARAM, _BUFFER}
        return frozenset(lost)

    def invert(self, tensors: Tensors, hyper: Mapping[str, Any]) -> None:
        """See :meth:`Rule.invert`."""
        lr, momentum = number(hyper["lr"]), number(hyper["momentum"])
        for param, grad, buffer in zip(tensors.params, tensors.grads, tensors.state[_BUFFER], strict=True):
            if PARAM not in tensors.journaled:
                update = grad.lerp(buffer, momentum) if hyper["nesterov"] else buffer
                update = orthogonalized(update, hyper["ns_coefficients"], hyper["ns_steps"], hyper["eps"])
                param.add_(update, alpha=orthogonalized_step_size(lr, hyper["adjust_lr_fn"], param.shape))
                undo_decay([param], 1 - lr * number(hyper["weight_decay"]))
            if tensors.computed(_BUFFER):
                undo_lerp([buffer], [grad], 1 - momentum)
