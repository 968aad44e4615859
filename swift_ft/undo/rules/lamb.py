"""LAMB, which torch does not have, and its rule (§4: the norms are saved)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from swift_ft.errors import UndoError, UsageError
from swift_ft.undo.rules.operations import directed, undo_decay, undo_lerp, undo_square
from swift_ft.undo.rules.rule import PARAM, SMALLEST_FACTOR, Rule, Tensors, is_lost, number, signed


class Lamb(Optimizer):
    """Layer-wise adaptive moments (You et al., 2020): AdamW whose step is scaled by a trust ratio.

    The ratio of the norms of parameter and update is kept in the state as ``trust_ratio``. This one number
    per parameter is enough to invert the step.

    Args:
        params: parameters, or groups of them.
        lr: learning rate; a number or a tensor with one element.
        betas: decay rates of the averages of gradient and squared gradient.
        eps: added to the denominator.
        weight_decay: added to the update before the trust ratio is computed.
        maximize: ascend instead of descending.

    Raises:
        UsageError: a hyper-parameter out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
    ) -> None:
        if number(lr) < 0 or eps < 0 or weight_decay < 0:
            raise UsageError(f"lr ({lr}), eps ({eps}) and weight_decay ({weight_decay}) cannot be negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise UsageError(f"betas must be in [0, 1), got {betas}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "differentiable": False,
        }
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Performs one step.

        Args:
            closure: computes the loss and the gradients again.

        Raises:
            UsageError: if a gradient is sparse or a parameter complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        if grad.is_sparse or param.is_complex():
            raise UsageError("Lamb takes neither sparse gradients nor complex parameters")
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        grad = directed([grad], signed(group))[0]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = _direction(state["exp_avg"], state["exp_avg_sq"], state["step"].item(), group)
        update.add_(param, alpha=group["weight_decay"])
        norm, length = param.norm(), update.norm()
        ratio = torch.where((norm > 0) & (length > 0), norm / length, torch.ones_like(norm))
        state["trust_ratio"] = ratio
        param.add_(update, alpha=-number(group["lr"]) * ratio.item())


def _direction(first: Tensor, second: Tensor, step: float, hyper: Mapping[str, Any]) -> Tensor:
    """Adam's direction with its bias corrections, in new memory."""
    beta1, beta2 = hyper["betas"]
    denominator = second.sqrt().div_((1 - beta2**step) ** 0.5).add_(hyper["eps"])
    return first.div(1 - beta1**step).div_(denominator)


class LambRule(Rule):
    """Inverts :class:`Lamb`: given the trust ratio, the update is linear in the parameter.

    The step multiplies the parameter by ``1 - lr * ratio * weight_decay``, and the ratio is known only after
    the step. If the ratio of the step before shows that this factor may be near 0, the parameter is
    journaled. If the factor is near 0 in spite of that forecast, ``undo()`` refuses.
    """

    error: ClassVar[str] = "up to 2 ulps; averages 2 ulps / beta"
    keys: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    left_behind: ClassVar[tuple[str, ...]] = ("trust_ratio",)
    elementwise: ClassVar[bool] = False

    def journaled_for(
        self, param: Tensor, state: Mapping[str, Any], hyper: Mapping[str, Any], exact: bool
    ) -> frozenset[str]:
        """The parts that are multiplied by almost 0; the parameter if that may happen."""
        beta1, beta2 = hyper["betas"]
        lost = {key for key, beta in (("exp_avg", beta1), ("exp_avg_sq", beta2)) if is_lost(beta)}
        decay = number(hyper["lr"]) * number(hyper["weight_decay"])
        ratio = number(state["trust_ratio"]) if state else 1.0
        if decay and not 1 - 4 * decay * ratio >= SMALLEST_FACTOR:  # a ratio seldom grows fourfold in a step
            lost.add(PARAM)
        return frozenset(lost)

    def invert(self, tensors: Tensors, hyper: Mapping[str, Any]) -> None:
        """See :meth:`Rule.invert`."""
        state, lr = tensors.state, number(hyper["lr"])
        if PARAM not in tensors.journaled:
            for index, param in enumerate(tensors.params):
                size = lr * tensors.notes[index]["trust_ratio"]
                factor = 1 - size * number(hyper["weight_decay"])
                if is_lost(factor) and not tensors.exact:
                    raise UndoError(
                        f"LAMB multiplied a parameter by {factor:.1e}, too little to be undone: "
                        "choose a smaller lr * weight_decay, or exact=True."
                    )
                step = tensors.steps[index]
                update = _direction(state["exp_avg"][index], state["exp_avg_sq"][index], step, hyper)
                param.add_(update, alpha=size)
                undo_decay([param], factor)
        if tensors.fresh:
            return
        beta1, beta2 = hyper["betas"]
        grads = directed(tensors.grads, signed(hyper))
        if tensors.computed("exp_avg"):
            undo_lerp(state["exp_avg"], grads, 1 - beta1)
        if tensors.computed("exp_avg_sq"):
            undo_square(state["exp_avg_sq"], grads, beta2, 1 - beta2)
