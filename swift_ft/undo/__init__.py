"""Undoing an optimizer's step (§4, Appendix A): rules, snapshots, residuals. No I/O, no threads."""

from swift_ft.undo.registry import register_rule
from swift_ft.undo.rules.rule import PARAM, Rule, Tensors, is_lost, number, signed

__all__ = ["PARAM", "Rule", "Tensors", "is_lost", "number", "register_rule", "signed"]
