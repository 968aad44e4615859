"""A worker's part in a change to another world: worker 0 says at which iteration all stop for it."""

from __future__ import annotations

from collections.abc import Callable

from swift_ft.recovery import events as ev
from swift_ft.recovery.handlers.worlds import all_prepared
from swift_ft.runtime.worker.part import Part, Round, StepInfo
from swift_ft.runtime.worker.ports import Job


class WorldsPart(Part):
    """See :class:`swift_ft.runtime.worker.part.Part`.

    Args:
        job: where the request is written.
        rank: this worker.
        on_first_live: called once this worker trains for the first time.
    """

    name = "worlds"

    def __init__(self, job: Job, rank: int, on_first_live: Callable[[], None]) -> None:
        self._job = job
        self._rank = rank
        self._on_first_live: Callable[[], None] | None = on_first_live

    def boundary(self, step: StepInfo) -> None:
        if self._rank:
            return
        state = self._job.state
        change = state.worlds.change
        if change is None or state.layouts.pending is not None or not all_prepared(state, change):
            return
        # In the future, so that all workers learn of it before they are there (decision 15).
        stop = step.completed + ev.REQUESTED_AHEAD
        world = change.world.number
        self._job.append(
            ev.SwitchRequested(rank=self._rank, generation=step.generation, iteration=stop, world=world)
        )

    def live(self, round: Round) -> None:
        if (first := self._on_first_live) is not None:
            self._on_first_live = None
            first()
