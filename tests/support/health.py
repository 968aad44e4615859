"""A health check of tests."""

from __future__ import annotations

from swift_ft.extend import HealthFacts


def good_until_lost(facts: HealthFacts) -> str:
    """A machine that was lost once is not taken again."""
    return "its third fan stands still" if facts.after_loss else ""
