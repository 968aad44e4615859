"""The registry of undo rules, by optimizer class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from swift_ft.torch_core.optimizers import makes_same_state, plain_step
from swift_ft.undo.rules.adafactor import AdafactorRule
from swift_ft.undo.rules.adam import AdamaxRule, AdamRule, NAdamRule, RAdamRule
from swift_ft.undo.rules.adaptive import AdadeltaRule, AdagradRule, RMSpropRule, RpropRule
from swift_ft.undo.rules.asgd import ASGDRule
from swift_ft.undo.rules.lamb import Lamb, LambRule
from swift_ft.undo.rules.muon import MuonRule
from swift_ft.undo.rules.rule import Rule, Tensors, number
from swift_ft.undo.rules.sgd import SGDRule

__all__ = ["SparseAdamRule", "rule_for", "touches_rows_only"]


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


def rule_for(kind: type[Optimizer]) -> Rule | None:
    """The rule for a class of optimizers. With None, everything is journaled.

    A subclass has its parent's rule if it uses the parent's step.
    """
    for parent in kind.__mro__:
        rule = _RULES.get(parent)
        if rule is None:
            continue
        return rule if makes_same_state(kind, parent) and plain_step(kind) is plain_step(parent) else None
    return None


def touches_rows_only(rule: Rule, grad: Tensor, hyper: Mapping[str, Any]) -> bool:
    """Whether a step with a sparse gradient changes only the rows that the gradient names."""
    if grad.layout is not torch.sparse_coo or grad.sparse_dim() != 1:
        return False
    if isinstance(rule, SGDRule):
        return number(hyper["momentum"]) == 0 and number(hyper["weight_decay"]) == 0
    return isinstance(rule, (AdagradRule, SparseAdamRule))
