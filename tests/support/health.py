"""Health checks of tests."""

from __future__ import annotations

import os
from pathlib import Path

from swift_ft.extend import HealthFacts


def never_good(_: HealthFacts) -> str:
    """No machine takes part."""
    return "its door is open"


def good_until_lost(facts: HealthFacts) -> str:
    """A machine that was lost once is not taken again."""
    return "its third fan stands still" if facts.after_loss else ""


def noted_and_good_twice(facts: HealthFacts) -> str:
    """Only the first two machines that are checked pass. All are noted in ``checked``."""
    noted = Path(os.environ["SWIFT_TEST_FOLDER"]) / "checked"
    with noted.open("a") as file:
        file.write(f"{facts.machine}\n")
    return "its door is open" if len(noted.read_text().splitlines()) > 2 else ""
