"""The status of a worker's state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WorkerStatus:
    """A worker's state between iterations. Owner: the training thread; read by threads that serve metrics.

    Attributes:
        iteration: iterations that it has completed.
        known: there is a state. False before the first one is made or loaded, and once it is lost.
        fresh: the memory still has what the script began with.
        dirty: why the state is neither before nor after an iteration and cannot be rolled back, if so.
        updated: indices of the parameters that the interrupted iteration has updated.
        recoveries: how often training has continued after an interruption, in this process.
        parts_done: how many of the script's parts after the last iteration it has done; None if it has done
            all that are due.
        steps: iterations that the script asks for in all; None until it does.
    """

    iteration: int = 0
    known: bool = False
    fresh: bool = True
    dirty: str | None = None
    updated: tuple[int, ...] = ()
    recoveries: int = 0
    parts_done: int | None = None
    steps: int | None = None

    def set_whole(self) -> None:
        """The state is that of an iteration's end, in all its parameters."""
        self.known, self.fresh, self.dirty, self.updated = True, False, None, ()
