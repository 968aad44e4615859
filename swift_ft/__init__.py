"""A recovery runtime for distributed training with stock PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swift_ft.determinism import deterministic
    from swift_ft.logging import LogBudget
    from swift_ft.metrics import SessionMetrics
    from swift_ft.optim import wrap_optimizer
    from swift_ft.session import Session, Step
    from swift_ft.undo.support import undo_support

__all__ = [
    "LogBudget",
    "Session",
    "SessionMetrics",
    "Step",
    "deterministic",
    "undo_support",
    "wrap_optimizer",
]

_HOMES = {
    "LogBudget": "swift_ft.logging",
    "Session": "swift_ft.session",
    "SessionMetrics": "swift_ft.metrics",
    "Step": "swift_ft.session",
    "deterministic": "swift_ft.determinism",
    "undo_support": "swift_ft.undo.support",
    "wrap_optimizer": "swift_ft.optim",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the launcher sets variables that torch reads when it is imported."""
    if name not in _HOMES:
        raise AttributeError(f"module 'swift_ft' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
