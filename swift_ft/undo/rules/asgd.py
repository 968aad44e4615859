"""ASGD: averaged stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from swift_ft.torch_core.shards import local
from swift_ft.undo.rules.operations import directed, undo_decay
from swift_ft.undo.rules.rule import PARAM, Rule, Tensors, is_lost, number, signed


class ASGDRule(Rule):
    """Inverts :class:`torch.optim.ASGD`.

    The step overwrites ``eta`` and ``mu``, so they are noted before it. While ``mu`` is 1 the average is a
    copy of the parameter, before the step and after it. Where that does not hold, it is journaled.
    """

    error: ClassVar[str] = "up to 2 ulps"
    keys: ClassVar[tuple[str, ...]] = ("ax",)
    small: ClassVar[tuple[str, ...]] = ("eta", "mu")

    def journaled_for(
        self, param: Tensor, state: Mapping[str, Any], hyper: Mapping[str, Any], exact: bool
    ) -> frozenset[str]:
        """The parameter if its decay factor is nearly 0, the average if the step overwrites another value."""
        lost = set()
        capturable = hyper["capturable"]  # reading a scalar would wait for the device
        eta = number(state["eta"] if state and not capturable else hyper["lr"])
        if is_lost(_factor(eta, hyper)):
            lost.add(PARAM)
        if state:
            mu = 1.0 if capturable else number(state["mu"])
            is_copy = mu == 1 and not capturable and torch.equal(local(state["ax"]), local(param))
            if is_lost(1 - mu) and not is_copy:
                lost.add("ax")
        return frozenset(lost)

    def note(self, param: Tensor, state: Mapping[str, Any], hyper: Mapping[str, Any]) -> dict[str, Any]:
        """The rates that the step uses; the first ones are known without a state."""
        if not state:
            return {"eta": number(hyper["lr"]), "mu": 1.0}
        return super().note(param, state, hyper)

    def invert(self, tensors: Tensors, hyper: Mapping[str, Any]) -> None:
        """See :meth:`Rule.invert`."""
        averages, mus = tensors.state["ax"], [note["mu"] for note in tensors.notes]
        for average, param, mu in zip(averages, tensors.params, mus, strict=True):
            if tensors.computed("ax") and mu != 1:
                average.add_(param, alpha=-mu).div_(1 - mu)
        if PARAM not in tensors.journaled:
            grads = directed(tensors.grads, signed(hyper))
            for param, grad, note in zip(tensors.params, grads, tensors.notes, strict=True):
                param.add_(grad, alpha=note["eta"])
                undo_decay([param], _factor(note["eta"], hyper))
        for average, param, mu in zip(averages, tensors.params, mus, strict=True):
            if tensors.computed("ax") and mu == 1:
                average.copy_(param)


def _factor(eta: float, hyper: Mapping[str, Any]) -> float:
    """The factor by which the step multiplied the parameter."""
    return 1 - eta * (number(hyper["lambd"]) + number(hyper["weight_decay"]))
