"""Adam, AdamW, AMSGrad, Adamax, NAdam, RAdam (Appendix A, Algorithms 6 and 8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from swift_ft.undo.rules.operations import corrections, decayed, directed, undo_decay, undo_lerp, undo_square
from swift_ft.undo.rules.rule import PARAM, Rule, Tensors, is_lost, number, signed

_FIRST, _SECOND, _LARGEST, _NORM = "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf"


def _factor(hyper: Mapping[str, Any]) -> float:
    """The factor by which a decoupled weight decay multiplied the parameter."""
    if not hyper.get("decoupled_weight_decay"):
        return 1.0
    return 1 - number(hyper["lr"]) * number(hyper["weight_decay"])


def _lossy(hyper: Mapping[str, Any]) -> set[str]:
    beta1, beta2 = (number(beta) for beta in hyper["betas"])
    factors = {PARAM: _factor(hyper), _FIRST: beta1, _SECOND: beta2}
    return {name for name, factor in factors.items() if is_lost(factor)}


def _invert_moments(tensors: Tensors, hyper: Mapping[str, Any]) -> None:
    """Inverts the averages. The parameters must already have their values before the step."""
    if tensors.fresh:
        return
    beta1, beta2 = (number(beta) for beta in hyper["betas"])
    grads = directed(tensors.grads, signed(hyper))
    if not hyper.get("decoupled_weight_decay"):
        grads = decayed(grads, tensors.params, number(hyper["weight_decay"]))
    if tensors.computed(_FIRST):
        undo_lerp(tensors.state[_FIRST], grads, 1 - beta1)
    if _SECOND in tensors.state and tensors.computed(_SECOND):
        undo_square(tensors.state[_SECOND], grads, beta2, 1 - beta2)


class AdamRule(Rule):
    """Inverts :class:`torch.optim.Adam` and :class:`torch.optim.AdamW`; AMSGrad's maximum is journaled."""

    error: ClassVar[str] = "up to 3 ulps; averages 2 ulps / beta"
    keys: ClassVar[tuple[str, ...]] = (_FIRST, _SECOND, _LARGEST)

    def makes(self, key: str, hyper: Mapping[str, Any]) -> bool:
        """The maximum, for AMSGrad."""
        return key != _LARGEST or bool(hyper["amsgrad"])

    def journaled(self, hyper: Mapping[str, Any], exact: bool) -> frozenset[str]:
        """AMSGrad's maximum, and each part that was multiplied by almost 0."""
        return frozenset(_lossy(hyper) | ({_LARGEST} if hyper["amsgrad"] else set()))

    def invert(self, tensors: Tensors, hyper: Mapping[str, Any]) -> None:
        """See :meth:`Rule.invert`."""
        if PARAM not in tensors.journaled:
            beta1, beta2 = (number(beta) for beta in hyper["betas"])
            lr = number(hyper["lr"])
            denominators = list(torch._foreach_sqrt(tensors.state[_LARGEST if hyper["amsgrad"] else _SECOND]))
            torch._foreach_div_(denominators, [left**0.5 for left in corrections(beta2, tensors, hyper)])
            torch._foreach_add_(denominators, number(hyper["eps"]))
            sizes = [lr / left for left in corrections(beta1, tensors, hyper)]
            torch._foreach_addcdiv_(tensors.params, tensors.state[_FIRST], denominators, sizes)
            del denominators
            undo_decay(tensors.params, _factor(hyper))
        _invert_moments(tensors, hyper)


class AdamaxRule(Rule):
    """Inverts :class:`torch.optim.Adamax`; the infinity norm is a maximum, so it is journaled."""

    error: ClassVar[str] = "up to 1 ulp; average 2 ulps / beta"
    keys: ClassVar[tuple[str, ...]] = (_FIRST, _NORM)

    def journaled(self, hyper: Mapping[str, Any], exact: bool) -> frozenset[str]:
        """The infinity norm, and the average where ``beta1`` is almost 0."""
        return frozenset((_lossy(hyper) - {_SECOND}) | {_NORM})

    def invert(self, tensors: Tensors, hyper: Mapping[str, Any]) -> None:
        """See :meth:`Rule.invert`."""
        beta1 = number(hyper["betas"][0])
        sizes = [number(hyper["lr"]) / left for left in corrections(beta1, tensors, hyper)]
        torch._foreach_addcdiv_(tensors.params, tensors.state[_FIRST], tensors.state[_NORM], sizes)
        _invert_moments(tensors, hyper)


class NAdamRule(Rule):
    """Inverts :class:`torch.optim.NAdam`.

    The update uses both the gradient and its average. With a coupled weight decay that gradient contains the
    parameter, whose factor ``1 - a * weight_decay / denominator`` can be 0 for single elements. The parameter
    is then journaled, unless a residual corrects the error.
    """

    error: ClassVar[str] = "up to 8 ulps; averages 2 ulps / beta"
    keys: ClassVar[tuple[str, ...]] = (_FIRST, _SECOND)
    small: ClassVar[tuple[str, ...]] = ("mu_product",)
    left_behind: ClassVar[tuple[str, ...]] = ("mu_product",)

    def journaled(self, hyper: Mapping[str, Any], exact: bool) -> frozenset[str]:
        """The parameter under a coupled weight decay, and each part that was multiplied by almost 0."""
        coupled = not hyper["decoupled_weight_decay"] and number(hyper["weight_decay"]) != 0
        return frozenset(_lossy(hyper) | ({PARAM} if coupled and not exact else set()))

    def note(self, param: Tensor, state: Mapping[str, Any], hyper: Mapping[str, Any]) -> dict[str, Any]:
        """The product of all momentum factors, which is 1 before the first step."""
        return super().note(param, state, hyper) or {"mu_product": 1.0}

    def invert(self, tensors: Tensors, hyper: Mapping[str, Any]) -> None:
        """See :meth:`Rule.invert`."""
        if PARAM not in tensors.journaled:
            self._invert_params(tensors, hyper)
        _invert_moments(tensors, hyper)

    def _invert_params(self, tensors: Tensors, hyper: Mapping[str, Any]) -> None:
        beta1, beta2 = (number(beta) for beta in hyper["betas"])
        lr, slope, decay = (number(hyper[name]) for name in ("lr", "momentum_decay", "weight_decay"))
        of_grad, of_average = [], []
        for step, note in zip(tensors.steps, tensors.notes, strict=True):
            now, later = (beta1 * (1.0 - 0.5 * 0.96 ** (at * slope)) for at in (step, step + 1))
            product = note["mu_product"]
            of_grad.append(lr * (1.0 - now) / (1.0 - product))
            of_average.append(lr * later / (1.0 - product * later))
        denominators = list(torch._foreach_sqrt(tensors.state[_SECOND]))
        torch._foreach_div_(denominators, [left**0.5 for left in corrections(beta2, tensors, hyper)])
        torch._foreach_add_(denominators, number(hyper["eps"]))
        torch._foreach_addcdiv_(tensors.params, tensors.state[_FIRST], denominators, of_average)
        grads = directed(tensors.grads, signed(hyper))
        torch._foreach_addcdiv_(tensors.params, grads, denominators, of_grad)
        if not hyper["decoupled_weight_decay"] and decay != 0:
            torch._foreach_reciprocal_(denominators)
            torch._foreach_mul_(denominators, [-size * decay for size in of_grad])
            torch._foreach_add_(denominators, 1.0)
            torch._foreach_div_(tensors.params, denominators)
        undo_decay(tensors.params, _factor(hyper))


class RAdamRule(Rule):
    """Inverts :class:`torch.optim.RAdam`: the rectification depends on the step number alone."""

    error: ClassVar[str] = "up to 4 ulps; averages 2 ulps / beta"
    keys: ClassVar[tuple[str, ...]] = (_FIRST, _SECOND)

    def journaled(self, hyper: Mapping[str, Any], exact: bool) -> frozenset[str]:
        """Each part that was multiplied by almost 0."""
        return frozenset(_lossy(hyper))

    def invert(self, tensors: Tensors, hyper: Mapping[str, Any]) -> None:
        """See :meth:`Rule.invert`."""
        if PARAM not in tensors.journaled:
            beta1, beta2 = (number(beta) for beta in hyper["betas"])
            lr = number(hyper["lr"])
            plain, rectified = [], []
            first, second = (corrections(beta, tensors, hyper) for beta in (beta1, beta2))
            for step, left1, left2 in zip(tensors.steps, first, second, strict=True):
                size, rectification = lr / left1, _rectification(beta2, step)
                plain.append(0.0 if rectification else size)
                rectified.append(size * rectification * left2**0.5)
            rates = list(torch._foreach_sqrt(tensors.state[_SECOND]))
            torch._foreach_add_(rates, number(hyper["eps"]))
            torch._foreach_reciprocal_(rates)
            torch._foreach_mul_(rates, rectified)
            torch._foreach_add_(rates, plain)
            torch._foreach_addcmul_(tensors.params, tensors.state[_FIRST], rates)
            undo_decay(tensors.params, _factor(hyper))
        _invert_moments(tensors, hyper)


def _rectification(beta2: float, step: float) -> float:
    """RAdam's factor for the variance of the adaptive rate; 0 while that is not tractable."""
    limit = 2 / (1 - beta2) - 1
    length = limit - 2 * step * beta2**step / (1 - beta2**step)
    if length <= 5:
        return 0.0
    return float(((length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)) ** 0.5)
