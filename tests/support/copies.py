"""What a training waits for that makes memory checkpoints."""

from __future__ import annotations

import swift_ft
from swift_ft.recovery.job_state import Phase
from tests.support.waiting import wait_until


def wait_for_copy(session: swift_ft.Session, completed: int) -> None:
    """Wait until the memory checkpoint of so many iterations is complete, or a loss is known.

    A copy that is due before that is skipped, and a test could not say which ones there are.
    """
    participant = session._assembly._participant

    def over() -> bool:
        newest = session.metrics().in_memory
        return participant.state.phase != Phase.LIVE or (newest is not None and newest >= completed)

    wait_until(over, lambda: f"the newest copy is {session.metrics().in_memory}, and not {completed}", 30.0)
