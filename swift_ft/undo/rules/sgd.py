"""SGD with momentum, dampening, Nesterov and weight decay (§4, Algorithm 2; Appendix A, Algorithm 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from swift_ft.undo.rules.operations import decayed, directed, undo_decay
from swift_ft.undo.rules.rule import PARAM, Rule, Tensors, is_lost, number, signed

_BUFFER = "momentum_buffer"


class SGDRule(Rule):
    """Inverts :class:`torch.optim.SGD`.

    The update contains the weight decay. If the update is read from the momentum buffer, this does not
    matter. Otherwise the parameter is ``(after + lr * rest) / (1 - lr * weight_decay)``.
    """

    error: ClassVar[str] = "up to 1 ulp; buffer 2 ulps / momentum"
    keys: ClassVar[tuple[str, ...]] = (_BUFFER,)
    # Seen with torch 2.13: the vectorized part of the CPU's kernel does not change such parameters.
    unreliable_kernels: ClassVar[frozenset[tuple[str, torch.dtype]]] = frozenset(
        {("cpu", torch.bfloat16), ("cpu", torch.float16)}
    )

    def makes(self, key: str, hyper: Mapping[str, Any]) -> bool:
        """The buffer, with momentum."""
        return number(hyper["momentum"]) != 0

    def journaled(self, hyper: Mapping[str, Any], exact: bool) -> frozenset[str]:
        """The parameter or the buffer, if the step multiplied it by a factor near 0."""
        lost = set()
        momentum = number(hyper["momentum"])
        if not _reads_buffer(hyper) and is_lost(1 - number(hyper["lr"]) * number(hyper["weight_decay"])):
            lost.add(PARAM)
        if momentum != 0 and is_lost(momentum):
            lost.add(_BUFFER)
        return frozenset(lost)

    def touches_rows_only(self, hyper: Mapping[str, Any]) -> bool:
        """Without momentum and decay, which change every row."""
        return number(hyper["momentum"]) == 0 and number(hyper["weight_decay"]) == 0

    def changes_gradient(self, hyper: Mapping[str, Any], foreach: bool) -> bool:
        """The foreach kernel adds Nesterov's momentum in place unless it made a copy before."""
        return bool(
            foreach and hyper["nesterov"] and not hyper["maximize"] and number(hyper["weight_decay"]) == 0
        )

    def invert(self, tensors: Tensors, hyper: Mapping[str, Any]) -> None:
        """See :meth:`Rule.invert`."""
        momentum, lr, decay = (number(hyper[name]) for name in ("momentum", "lr", "weight_decay"))
        buffers = tensors.state.get(_BUFFER, [])
        if tensors.gradient_changed:
            if PARAM not in tensors.journaled:
                torch._foreach_add_(tensors.params, tensors.grads, alpha=lr)
            torch._foreach_add_(tensors.grads, buffers, alpha=-momentum)
        elif PARAM not in tensors.journaled:
            self._invert_params(tensors, hyper, lr, decay)
        if momentum != 0 and tensors.computed(_BUFFER):
            grads = directed(tensors.grads, signed(hyper))
            grads = decayed(grads, tensors.params, decay)
            torch._foreach_add_(buffers, grads, alpha=-(1 - number(hyper["dampening"])))
            torch._foreach_div_(buffers, momentum)

    def _invert_params(self, tensors: Tensors, hyper: Mapping[str, Any], lr: float, decay: float) -> None:
        if _reads_buffer(hyper):
            torch._foreach_add_(tensors.params, tensors.state[_BUFFER], alpha=lr)
            return
        if hyper["nesterov"]:
            update = list(torch._foreach_mul(tensors.state[_BUFFER], number(hyper["momentum"])))
            torch._foreach_add_(update, tensors.grads, alpha=signed(hyper))
            torch._foreach_add_(tensors.params, update, alpha=lr)
        else:
            torch._foreach_add_(tensors.params, tensors.grads, alpha=lr * signed(hyper))
        undo_decay(tensors.params, 1 - lr * decay)


def _reads_buffer(hyper: Mapping[str, Any]) -> bool:
    return number(hyper["momentum"]) != 0 and not hyper["nesterov"]
