"""How long a disturbed run may take: as long as its faults let it."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_ft.faults import parse_faults
from swift_ft.testing.chaos.running import limit_of
from swift_ft.testing.chaos.trial import Outcome, Training, Trial

UNDISTURBED = Trial("", Outcome.IDENTICAL, 0, "", {}, Path("run"), wall_s=100.0)


@pytest.mark.parametrize(
    ("plan", "at_least"),
    [
        ("slow worker=1 iteration=1 factor=5", 500),
        ("slow worker=1 iteration=1", 300),
        ("slow worker=0 iteration=1 factor=8; slow worker=1 iteration=1 factor=2", 800),
        ("suspend machine=1 iteration=1 seconds=400", 500),
        ("lag worker=1 iteration=1 seconds=200; vanish worker=0 iteration=3 seconds=250", 550),
        ("kill machine=1 iteration=7; kill machine=0 iteration=8", 200),
    ],
)
def test_what_faults_cost_is_no_hang(plan: str, at_least: float) -> None:
    limit = limit_of(Training((), (), "", 10.0), parse_faults(plan), UNDISTURBED)
    assert at_least <= limit < 2 * at_least + 200


def test_the_limit_that_was_asked_for_is_the_shortest() -> None:
    """A clock that jumps by a day takes no time."""
    plan = parse_faults("clock worker=1 iteration=1 seconds=-86400; kill machine=1 iteration=3")
    assert limit_of(Training((), (), "", 5000.0), plan, UNDISTURBED) == 5000.0
    assert limit_of(Training((), (), "", 10.0), plan, UNDISTURBED) < 1000
