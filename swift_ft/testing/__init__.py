"""Test kits: the conformance suite for stores, scenarios of the recovery protocol, and simulated jobs.

Each is imported when it is first used: the conformance suite needs pytest, which training does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swift_ft.testing.scenario import Scenario, ScenarioError
    from swift_ft.testing.simulation import JobKind, Outcome, Violation, simulate
    from swift_ft.testing.store_conformance import StoreConformanceTests

__all__ = [
    "JobKind",
    "Outcome",
    "Scenario",
    "ScenarioError",
    "StoreConformanceTests",
    "Violation",
    "simulate",
]

_MODULES = {
    "JobKind": "simulation",
    "Outcome": "simulation",
    "Scenario": "scenario",
    "ScenarioError": "scenario",
    "StoreConformanceTests": "store_conformance",
    "Violation": "simulation",
    "simulate": "simulation",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
