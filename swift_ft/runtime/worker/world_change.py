"""A worker's part in a change to another world: it takes the state of the present one, or offers its own.

Its calls that may wait are yielded, as those of the core (`core.py`) are.
"""

from __future__ import annotations

from swift_ft.errors import CheckpointError, RecoveryError, SwiftError
from swift_ft.faults.failpoints import Point, hit
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.worlds import Change
from swift_ft.runtime.worker.flow import Call, Flow
from swift_ft.runtime.worker.ports import Handover, Job
from swift_ft.runtime.worker.status import WorkerStatus


class WorldChange:
    """One worker's part.

    Args:
        rank: its rank.
        status: the iteration and the condition of its state.
        job: the job as this worker knows it.
        handover: how the state comes to another world.
    """

    def __init__(self, rank: int, status: WorkerStatus, job: Job, handover: Handover) -> None:
        self._rank = rank
        self._status = status
        self._job = job
        self._handover = handover

    def withdraw(self) -> None:
        """Serve the state to nobody any more."""
        self._handover.withdraw()

    def prepare(self, state: State) -> Flow[None]:
        """All that can be made without the state is made."""
        hit(Point.PREPARED, self._status.iteration)
        change = state.worlds.change
        assert change is not None
        yield self._handover.make_ready
        yield Call(self._job.append, ev.NextPrepared(rank=self._rank, world=change.world.number))

    def take(self, state: State) -> Flow[None]:
        """Take the state of the present world. If that fails, it trains on."""
        change, pending = state.worlds.change, state.layouts.pending
        assert change is not None
        assert pending is not None
        hit(Point.TAKE, pending.iteration)
        try:
            taken = yield Call(self._handover.take, state)
        except (RecoveryError, CheckpointError) as error:
            reason = f"worker {self._rank} of the next world cannot take its state: {error}"
            yield Call(self._job.append, ev.ChangeGivenUp(world=change.world.number, reason=reason))
            return
        self._status.iteration, self._status.known, self._status.fresh = pending.iteration, True, False
        yield Call(self._job.append, taken)

    def offer(self) -> Flow[None]:
        """Serve a state to the next world, which takes over once all its workers have what they need."""
        state = self._job.state
        change, pending = state.worlds.change, state.layouts.pending
        if change is None or pending is None:  # it was given up just now
            return
        hit(Point.OFFER, self._status.iteration)
        # Others have stopped before a step that this one had begun. A copy is of another time.
        if self._status.dirty and not change.copies:
            yield from self._offers_nothing(change, f"it is in the middle of an update: {self._status.dirty}")
            return
        try:
            offered = yield Call(self._handover.offer, state, pending.iteration)
        except SwiftError as error:  # also of a value that cannot be saved: the present world goes on
            yield from self._offers_nothing(change, str(error))
            return
        yield Call(self._job.append, offered)

    def _offers_nothing(self, change: Change, why: str) -> Flow[None]:
        reason = f"worker {self._rank} cannot hand its state over: {why}"
        yield Call(self._job.append, ev.ChangeGivenUp(world=change.world.number, reason=reason))
