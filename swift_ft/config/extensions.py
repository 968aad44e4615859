"""Additions that installed packages bring along by entry points: undo rules, stores, schedules, parts.

A package names a function without arguments in one of these groups. Nothing is looked for before it could be
needed, and then once: it takes some milliseconds.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from swift_ft.errors import UsageError, first_line


class Extensions(StrEnum):
    """Groups of entry points."""

    UNDO_RULES = "swift_ft.undo_rules"
    """Functions that call :func:`swift_ft.extend.register_rule`."""
    STORES = "swift_ft.stores"
    """Functions that call :func:`swift_ft.extend.register_store`."""
    SCHEDULES = "swift_ft.schedules"
    """Functions that call :func:`swift_ft.extend.register_schedule`."""
    PARTS = "swift_ft.parts"
    """Functions that return a :class:`swift_ft.extend.Part` for a worker, or None if it needs none."""


def load(group: Extensions) -> list[Any]:
    """Call the functions of a group.

    Returns:
        Their results.

    Raises:
        UsageError: one cannot be loaded, or raises.
    """
    made = []
    for entry in entry_points(group=group):
        try:
            made.append(entry.load()())
        except Exception as error:
            package = entry.dist.name if entry.dist else "?"
            raise UsageError(
                f"The package {package} brings something for {group} that cannot be loaded "
                f"(entry point {entry.name} = {entry.value}): {first_line(error)}"
            ) from error
    return made


@cache
def load_once(group: Extensions) -> None:
    """Call the functions of a group, unless that was done in this process: for those that register."""
    load(group)
