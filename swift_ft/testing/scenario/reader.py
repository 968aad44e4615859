"""Runs a scenario line by line."""

from __future__ import annotations

from pathlib import Path

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step
from swift_ft.testing.scenario.events import read_events
from swift_ft.testing.scenario.expectations import check
from swift_ft.testing.scenario.line import Line, ScenarioError


class Scenario:
    """Runs the lines of a scenario; the package's docstring lists them.

    Attributes:
        state: after the lines so far.
        expectations: how many lines expected something.
    """

    def __init__(self) -> None:
        self.state = State()
        self.expectations = 0

    def run(self, path: Path) -> None:
        """Run a file.

        Raises:
            ScenarioError: for a line that does not hold or cannot be read, with its number.
        """
        for number, text in enumerate(path.read_text().splitlines(), 1):
            try:
                self.run_line(text)
            except Exception as error:
                raise ScenarioError(f"{path.name}:{number}: {text.strip()}\n  {error}") from error

    def run_line(self, text: str) -> None:
        """Run one line."""
        line = Line(text)
        if not line:
            return
        name = line.take()
        if name == "expect":
            self.expectations += 1
            check(line.take(), line, self.state)
        else:
            for event in read_events(name, line, self.state):
                self.apply(event)
        line.finish()

    def apply(self, event: ev.Event) -> None:
        """Apply one event."""
        self.state = step(self.state, event)
