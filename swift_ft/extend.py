"""Additions of users: an undo rule, a store, a schedule, a part of a worker, a health check.

Each of the first four is registered by a call in the script, or by an entry point of an installed package,
and has a conformance suite in :mod:`swift_ft.testing`. docs/how-to/extend.md shows all four. A health check
is named by ``--health-checks``.
"""

from __future__ import annotations

from swift_ft.launch.health.facts import ClockReading, HealthCheck, HealthFacts
from swift_ft.runtime.worker.part import Interruption, Part, Round, StepInfo
from swift_ft.storage.files import Files
from swift_ft.storage.remote import RemoteFiles, register_store
from swift_ft.torch_adapters.pipelining.schedule_order import register_schedule
from swift_ft.undo import Rule, register_rule

__all__ = [
    "ClockReading",
    "Files",
    "HealthCheck",
    "HealthFacts",
    "Interruption",
    "Part",
    "RemoteFiles",
    "Round",
    "Rule",
    "StepInfo",
    "register_rule",
    "register_schedule",
    "register_store",
]
