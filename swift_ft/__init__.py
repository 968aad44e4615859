"""A recovery runtime for distributed training with stock PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swift_ft.config.plain_python import say_mistakes_in_one_line

if TYPE_CHECKING:
    __version__: str
    from swift_ft import data as data
    from swift_ft.checkpoint.layer_costs import measured_costs
    from swift_ft.determinism import deterministic
    from swift_ft.logging import LogBudget
    from swift_ft.optim import wrap_optimizer
    from swift_ft.runtime.degrees import degrees
    from swift_ft.runtime.metrics import SessionMetrics
    from swift_ft.runtime.steps import Step
    from swift_ft.session import Session
    from swift_ft.torch_adapters.layer_stack import LayerStack
    from swift_ft.undo.support import undo_support

__all__ = [
    "LayerStack",
    "LogBudget",
    "Session",
    "SessionMetrics",
    "Step",
    "degrees",
    "deterministic",
    "measured_costs",
    "undo_support",
    "wrap_optimizer",
]

_HOMES = {
    "LayerStack": "swift_ft.torch_adapters.layer_stack",
    "LogBudget": "swift_ft.logging",
    "Session": "swift_ft.session",
    "SessionMetrics": "swift_ft.runtime.metrics",
    "Step": "swift_ft.runtime.steps",
    "degrees": "swift_ft.runtime.degrees",
    "deterministic": "swift_ft.determinism",
    "measured_costs": "swift_ft.checkpoint.layer_costs",
    "undo_support": "swift_ft.undo.support",
    "wrap_optimizer": "swift_ft.optim",
}


say_mistakes_in_one_line()


def __getattr__(name: str) -> Any:
    """Import on first use: the launcher sets variables that torch reads when it is imported."""
    from importlib import import_module

    if name == "__version__":
        return str(import_module("swift_ft.config.installed").installed_version())
    if name == "data":
        return import_module("swift_ft.data")
    if name not in _HOMES:
        raise AttributeError(f"module 'swift_ft' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """All that there is, whether it was imported or not."""
    return sorted({*globals(), *__all__, "__version__", "data"})
