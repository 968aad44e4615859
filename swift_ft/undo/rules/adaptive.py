"""Adagrad, RMSprop, Adadelta and Rprop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from swift_ft.undo.rules.operations import decayed, directed, undo_lerp, undo_square
from swift_ft.undo.rules.rule import PARAM, Rule, Tensors, is_lost, number, signed


def _coupled(hyper: Mapping[str, Any]) -> bool:
    return number(hyper["weight_decay"]) != 0


def _undo_scaled(tensors: Tensors, hyper: Mapping[str, Any], roots: list[Tensor], sizes: list[float]) -> None:
    """Inverts ``param -= size * (grad + weight_decay * param) / root``; overwrites the roots."""
    grads = directed(tensors.grads, signed(hyper))
    torch._foreach_addcdiv_(tensors.params, grads, roots, sizes)
    if _coupled(hyper):
        decay = number(hyper["weight_decay"])
        torch._foreach_reciprocal_(roots)
        torch._foreach_mul_(roots, [-size * decay for size in sizes])
        torch._foreach_add_(roots, 1.0)
        torch._foreach_div_(tensors.params, roots)


class AdagradRule(Rule):
    """Inverts :class:`torch.optim.Adagrad`.

    A weight decay multiplies each element by its own factor, which can be 0. The parameter is then journaled,
    unless a residual corrects the error.
    """

    error: ClassVar[str] = "up to 1 ulp; sum 5 ulps"
    keys: ClassVar[tuple[str, ...]] = ("sum",)

    def touches_rows_only(self, hyper: Mapping[str, Any]) -> bool:
        """Always: a sparse gradient and a weight decay exclude each other."""
        del hyper
        return True

    def journaled(self, hyper: Mapping[str, Any], exact: bool) -> frozenset[str]:
        """The parameter under weight decay."""
        return frozenset({PARAM} if _coupled(hyper) and not exact else ())

    def invert(self, tensors: Tensors, hyper: Mapping[str, Any]) -> None:
        """See :meth:`Rule.invert`."""
        if PARAM not in tensors.journaled:
            roots = list(torch._foreach_sqrt(tensors.state["sum"]))
            torch._foreach_add_(roots, number(hyper["eps"]))
            slowing = number(hyper["lr_decay"])
            sizes = [number(hyper["lr"]) / (1 + (step - 1) * slowing) for step in tensors.steps]
            _undo_scaled(tensors, hyper, roots, sizes)
        if tensors.computed("sum"):
            grads = directed(tensors.grads, signed(hyper))
            grads = decayed(grads, tensors.params, number(hyper["weight_decay"]))
            undo_square(tensors.state["sum"], grads, 1.0, 1.0)


class RMSpropRule(Rule):
    """Inverts :class:`torch.optim.RMSprop`, centered or not, with or without momentum.

    Without momentum, weight decay is treated as for Adagrad.
    """

    error: ClassVar[str] = "up to 1 ulp; averages 2 ulps / factor"
    keys: ClassVar[tuple[str, ...]] = ("square_avg", "grad_avg", "momentum_buffer")

    def makes(self, key: str, hyper: Mapping[str, Any]) -> bool:
        """The buffer with momentum, the mean if centered."""
        needed = {"grad_avg": bool(hyper["centered"]), "momentum_buffer": number(hyper["momentum"]) > 0}
        return needed.get(key, True)

    def journaled(self, hyper: Mapping[str, Any], exact: bool) -> frozenset[str]:
        """The parameter under weight decay without momentum, and each part multiplied by almost 0."""
        lost = set()
        momentum = number(hyper["momentum"])
        if momentum <= 0 and _coupled(hyper) and not exact:
            lost.add(PARAM)
        if momentum > 0 and is_lost(momentum):
            lost.add("momentum_buffer")
        if is_lost(number(hyper["alpha"])):
            lost |= {"square_avg", "grad_avg"}
        return frozenset(lost)

    def invert(self, tensors: Tensors, hyper: Mapping[str, Any]) -> None:
        """See :meth:`Rule.invert`."""
        state, lr, momentum = tensors.state, number(hyper["lr"]), number(hyper["momentum"])
        if PARAM not in tensors.journaled:
            if momentum > 0:
                torch._foreach_add_(tensors.params, state["momentum_buffer"], alpha=lr)
            else:
                _undo_scaled(tensors, hyper, _roots(tensors, hyper), [lr] * len(tensors.params))
        if tensors.fresh:
            return
        grads = directed(tensors.grads, signed(hyper))
        grads = decayed(grads, tensors.params, number(hyper["weight_decay"]))
        if momentum > 0 and tensors.computed("momentum_buffer"):
            torch._foreach_addcdiv_(state["momentum_buffer"], grads, _roots(tensors, hyper), -1.0)
            torch._foreach_div_(state["momentum_buffer"], momentum)
        alpha = number(hyper["alpha"])
        if hyper["centered"] and tensors.computed("grad_avg"):
            undo_lerp(state["grad_avg"], grads, 1 - alpha)
        if tensors.computed("square_avg"):
            undo_square(state["square_avg"], grads, alpha, 1 - alpha)


def _roots(tensors: Tensors, hyper: Mapping[str, Any]) -> list[Tensor]:
    """RMSprop's denominators, from the averages after the step."""
    squares = tensors.state["square_avg"]
    if hyper["centered"]:
        means = tensors.state["grad_avg"]
        roots = list(torch._foreach_addcmul(squares, means, means, -1.0))
        torch._foreach_sqrt_(roots)
    else:
        roots = list(torch._foreach_sqrt(squares))
    torch._foreach_add_(roots, number(hyper["eps"]))
    return roots


class AdadeltaRule(Rule):
    """Inverts :class:`torch.optim.Adadelta`.

    With ``k = grad² / (square_avg + eps)`` the average of the updates was multiplied by
    ``rho + (1 - rho) * k``, which is never small. With weight decay the equation for the parameter is cubic,
    so the parameter is journaled.
    """

    error: ClassVar[str] = "up to 5 ulps; averages 5 ulps / rho"
    keys: ClassVar[tuple[str, ...]] = ("acc_delta", "square_avg")

    def journaled(self, hyper: Mapping[str, Any], exact: bool) -> frozenset[str]:
        """The parameter under weight decay, and the averages where ``rho`` is almost 0."""
        lost = {PARAM} if _coupled(hyper) else set()
        return frozenset(lost | ({"acc_delta", "square_avg"} if is_lost(number(hyper["rho"])) else set()))

    def journaled_for(
        self, param: Tensor, state: Mapping[str, Any], hyper: Mapping[str, Any], exact: bool
    ) -> frozenset[str]:
        """The update is read from the average before the step, which a snapshot restores too late."""
        journaled = self.journaled(hyper, exact)
        return journaled | {PARAM} if "acc_delta" in journaled else journaled

    def invert(self, tensors: Tensors, hyper: Mapping[str, Any]) -> None:
        """See :meth:`Rule.invert`."""
        rho, eps = number(hyper["rho"]), number(hyper["eps"])
        grads = directed(tensors.grads, signed(hyper))
        if PARAM in tensors.journaled and tensors.fresh:
            return
        if PARAM in tensors.journaled:
            grads = decayed(grads, tensors.params, number(hyper["weight_decay"]))
        if "acc_delta" in tensors.journaled:
            return
        roots = list(torch._foreach_add(tensors.state["square_avg"], eps))
        ratios = list(torch._foreach_mul(grads, grads))
        torch._foreach_div_(ratios, roots)
        torch._foreach_mul_(ratios, 1 - rho)
        updates = tensors.state["acc_delta"]
        torch._foreach_add_(updates, ratios, alpha=-eps)
        torch._foreach_add_(ratios, rho)
        torch._foreach_div_(updates, ratios)
        torch._foreach_clamp_min_(updates, 0.0)
        if PARAM not in tensors.journaled:
            deltas = list(torch._foreach_add(updates, eps))
            torch._foreach_sqrt_(deltas)
            torch._foreach_sqrt_(roots)
            torch._foreach_div_(deltas, roots)
            torch._foreach_mul_(deltas, grads)
            torch._foreach_add_(tensors.params, deltas, alpha=number(hyper["lr"]))
        if tensors.computed("square_avg"):
            undo_square(tensors.state["square_avg"], grads, rho, 1 - rho)


class RpropRule(Rule):
    """Inverts :class:`torch.optim.Rprop`: the parameter is inverted by algebra, the rest is journaled.

    The step overwrites the previous gradient and clamps the step sizes.
    """

    error: ClassVar[str] = "up to 1 ulp"
    keys: ClassVar[tuple[str, ...]] = ("prev", "step_size")

    def journaled(self, hyper: Mapping[str, Any], exact: bool) -> frozenset[str]:
        """The previous gradient and the step sizes."""
        return frozenset({"prev", "step_size"})

    def invert(self, tensors: Tensors, hyper: Mapping[str, Any]) -> None:
        """See :meth:`Rule.invert`."""
        signs = list(torch._foreach_sign(tensors.state["prev"]))
        torch._foreach_addcmul_(tensors.params, signs, tensors.state["step_size"], 1.0)
