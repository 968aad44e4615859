"""Every recovery as a small text file: words in `scenario.py`, stories in `tests/scenarios/`."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_ft.testing.scenario import Scenario, ScenarioError

FOLDER = Path(__file__).parents[1] / "scenarios"
FILES = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    scenario = Scenario()
    scenario.run(path)
    assert scenario.expectations, "a scenario that expects nothing cannot fail"


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 25


@pytest.mark.parametrize(
    "line",
    [
        "expect phase live",
        "expect generation 2",
        "expect members A B - D",
        "expect worker 1 run",
        "expect agent B wait",
        "expect committed 20",
        "expect verdict ok",
        "report 1 at",
        "report 1 nothing surely",
        "lost",
        "ready 1 maybe=1",
        "no-such-event",
    ],
)
def test_a_wrong_line_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.txt"
    path.write_text(f"open 4\njoin A B C D\n\n{line}\n")
    with pytest.raises(ScenarioError, match=r"^wrong.txt:4"):
        Scenario().run(path)
