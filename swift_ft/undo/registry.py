"""Which rule inverts which optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from swift_ft.undo.adafactor import AdafactorRule
from swift_ft.undo.adam import AdamaxRule, AdamRule, NAdamRule, RAdamRule
from swift_ft.undo.adaptive import AdadeltaRule, AdagradRule, RMSpropRule, RpropRule
from swift_ft.undo.asgd import ASGDRule
from swift_ft.undo.lamb import Lamb, LambRule
from swift_ft.undo.muon import MuonRule
from swift_ft.undo.rule import Rule, Tensors, number
from swift_ft.undo.sgd import SGDRule

__all__ = ["SparseAdamRule", "plain_step", "rule_for", "touches_rows_only"]


class SparseAdamRule(Rule):
    """:class:`torch.optim.SparseAdam`: the rows that the gradient names are journaled."""

    keys = ("exp_avg", "exp_avg_sq")

    def invert(self, tensors: Tensors, hyper: Mapping[str, Any]) -> None:
        """Nothing is left to compute."""


_RULES: dict[type[Optimizer], Rule] = {
    torch.optim.SGD: SGDRule(),
    torch.optim.Adam: AdamRule(),
    torch.optim.AdamW: AdamRule(),
    torch.optim.Adamax: AdamaxRule(),
    torch.optim.NAdam: NAdamRule(),
    torch.optim.RAdam: RAdamRule(),
    torch.optim.Adagrad: AdagradRule(),
    torch.optim.RMSprop: RMSpropRule(),
    torch.optim.Adadelta: AdadeltaRule(),
    torch.optim.Rprop: RpropRule(),
    torch.optim.ASGD: ASGDRule(),
    torch.optim.Muon: MuonRule(),
    torch.optim.Adafactor: AdafactorRule(),
    torch.optim.SparseAdam: SparseAdamRule(),
    Lamb: LambRule(),
}


def plain_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """A class's ``step`` without torch's hooks around it."""
    step: Callable[..., Any] = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]  # functools.wraps put it there
    return step


def rule_for(kind: type[Optimizer]) -> Rule | None:
    """The rule for a class of optimizers, or None: then everything is journaled.

    A subclass has its parent's rule as long as it takes the parent's step.
    """
    for parent in kind.__mro__:
        rule = _RULES.get(parent)
        if rule is None:
            continue
        same_state = getattr(kind, "_init_group", None) is getattr(parent, "_init_group", None)
        return rule if same_state and plain_step(kind) is plain_step(parent) else None
    return None


def touches_rows_only(rule: Rule, grad: Tensor, hyper: Mapping[str, Any]) -> bool:
    """Whether a step with a sparse gradient leaves all rows alone that the gradient does not name."""
    if grad.layout is not torch.sparse_coo or grad.sparse_dim() != 1:
        return False
    if isinstance(rule, SGDRule):
        return number(hyper["momentum"]) == 0 and number(hyper["weight_decay"]) == 0
    return isinstance(rule, (AdagradRule, SparseAdamRule))
