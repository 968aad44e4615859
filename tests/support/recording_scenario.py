"""A scenario of the protocol whose events a test looks at afterwards."""

from __future__ import annotations

from swift_ft.recovery import events as ev
from swift_ft.testing.scenario import Scenario


class RecordingScenario(Scenario):
    """A scenario that keeps its events."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[ev.Event] = []

    def apply(self, event: ev.Event) -> None:
        """One more event."""
        self.events.append(event)
        super().apply(event)
