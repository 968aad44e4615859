"""The registry of undo rules, by optimizer class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from swift_ft.config.extensions import Extensions, load_once
from swift_ft.errors import UsageError
from swift_ft.torch_core.optimizers import makes_same_state, plain_step
from swift_ft.undo.rules.adafactor import AdafactorRule
from swift_ft.undo.rules.adam import AdamaxRule, AdamRule, NAdamRule, RAdamRule
from swift_ft.undo.rules.adaptive import AdadeltaRule, AdagradRule, RMSpropRule, RpropRule
from swift_ft.undo.rules.asgd import ASGDRule
from swift_ft.undo.rules.lamb import Lamb, LambRule
from swift_ft.undo.rules.muon import MuonRule
from swift_ft.undo.rules.rule import Rule, Tensors
from swift_ft.undo.rules.sgd import SGDRule


class SparseAdamRule(Rule):
    """:class:`torch.optim.SparseAdam`: the rows that the gradient names are journaled."""

    keys = ("exp_avg", "exp_avg_sq")
    keeps_rows = True

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


def register_rule(kind: type[Optimizer], rule: Rule) -> None:
    """Makes the step of an optimizer of your own invertible, or inverts one of torch's in another way.

    Subclasses that use the step of ``kind`` have the rule, too. ``swift_ft.testing.UndoRuleConformanceTests``
    says whether a rule keeps its promises. A package brings its rules with an entry point of the group
    ``swift_ft.undo_rules`` that names a function without arguments which calls this one.

    Args:
        kind: a class of optimizers, not an instance.
        rule: an instance; one serves all optimizers of the class.

    Raises:
        UsageError: ``kind`` is not a class of optimizers, or ``rule`` not a rule.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise UsageError(f"register_rule() takes a class of torch.optim.Optimizer first, not {kind!r}.")
    if not isinstance(rule, Rule):
        raise UsageError(
            f"register_rule() takes an instance of a subclass of swift_ft.undo.Rule, not {rule!r}."
        )
    _RULES[kind] = rule


def rule_for(kind: type[Optimizer]) -> Rule | None:
    """The rule for a class of optimizers. With None, everything is journaled.

    A subclass has its parent's rule if it uses the parent's step.

    Raises:
        UsageError: rules that an installed package brings cannot be loaded.
    """
    if not kind.__module__.startswith("torch.optim."):
        load_once(Extensions.UNDO_RULES)  # not before an optimizer comes that is not torch's
    for parent in kind.__mro__:
        rule = _RULES.get(parent)
        if rule is None:
            continue
        return rule if makes_same_state(kind, parent) and plain_step(kind) is plain_step(parent) else None
    return None
