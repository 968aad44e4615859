"""Test kits: conformance suites for stores, scenarios of the recovery protocol, and simulated jobs.

Each is imported when it is first used: the conformance suites need pytest, which training does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swift_ft.testing.part_conformance import PartConformanceTests
    from swift_ft.testing.scenario import Scenario, ScenarioError
    from swift_ft.testing.schedule_conformance import ScheduleConformanceTests
    from swift_ft.testing.simulation import JobKind, Outcome, Violation, simulate
    from swift_ft.testing.store_conformance import StoreConformanceTests
    from swift_ft.testing.undo_rule_conformance import UndoRuleConformanceTests

__all__ = [
    "JobKind",
    "Outcome",
    "PartConformanceTests",
    "Scenario",
    "ScenarioError",
    "ScheduleConformanceTests",
    "StoreConformanceTests",
    "UndoRuleConformanceTests",
    "Violation",
    "simulate",
]

_MODULES = {
    "JobKind": "simulation",
    "Outcome": "simulation",
    "PartConformanceTests": "part_conformance",
    "Scenario": "scenario",
    "ScenarioError": "scenario",
    "ScheduleConformanceTests": "schedule_conformance",
    "StoreConformanceTests": "store_conformance",
    "UndoRuleConformanceTests": "undo_rule_conformance",
    "Violation": "simulation",
    "simulate": "simulation",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
