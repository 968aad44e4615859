"""What a training waits for before it kills others."""

from __future__ import annotations

import swift_ft
from swift_ft.recovery.job_state import State

_COMMIT_S = 20.0
_SPARE_S = 20.0


def wait_for_commit(session: swift_ft.Session, index: int) -> None:
    """Wait for the last checkpoint before a step, as a fault does (``swift_ft.faults``).

    Returns all the same if there is none in time.
    """
    every = session._assembly._settings.checkpoint_every
    wanted = (index - 1) // every * every

    def over(state: State) -> bool:
        return (state.checkpoints.committed or 0) >= wanted

    session._assembly._participant.wait_for(over, _COMMIT_S)


def wait_for_spare(session: swift_ft.Session) -> None:
    """Wait until a spare has joined: then it has made its connections to the rendezvous store."""
    joined = session._assembly._participant.wait_for(lambda state: bool(state.membership.spares), _SPARE_S)
    assert joined is not None, "no spare has joined"
