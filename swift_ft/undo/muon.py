"""Muon: momentum, orthogonalized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import (
    _muon,  # the orthogonalization has no public name, and the inverse must run the same one
)

from swift_ft.undo.operations import undo_decay, undo_lerp
from swift_ft.undo.rule import PARAM, Rule, Tensors, is_lost, number

__all__ = ["MuonRule"]

_BUFFER = "momentum_buffer"


class MuonRule(Rule):
    """Inverts :class:`torch.optim.Muon`: the orthogonalized update is computed again from the momentum."""

    error: ClassVar[str] = "up to 1 ulp; buffer 2 ulps / momentum"
    keys: ClassVar[tuple[str, ...]] = (_BUFFER,)
    shardable: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False

    def kept_for(
        self, param: Tensor, state: Mapping[str, Any], hyper: Mapping[str, Any], exact: bool
    ) -> frozenset[str]:
        """What a factor near 0 was multiplied into, and a buffer that the step normalizes in place.

        Without Nesterov, torch orthogonalizes ``buffer.bfloat16()``, which is the buffer itself where that is
        in bfloat16 already; nothing can be computed from it then.
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
            if PARAM not in tensors.kept:
                update = grad.lerp(buffer, momentum) if hyper["nesterov"] else buffer
                update = _muon._zeropower_via_newtonschulz(
                    update, hyper["ns_coefficients"], hyper["ns_steps"], hyper["eps"]
                )
                param.add_(update, alpha=_muon._adjust_lr(lr, hyper["adjust_lr_fn"], param.shape))
                undo_decay([param], 1 - lr * number(hyper["weight_decay"]))
            if tensors.computed(_BUFFER):
                undo_lerp([buffer], [grad], 1 - momentum)
