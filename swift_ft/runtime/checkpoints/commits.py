"""Commits checkpoints: once all parts are in the store, one worker writes the marker (paper §3)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from immutables import Map

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.coordination.participant import Participant
from swift_ft.errors import FencedError, SwiftError
from swift_ft.faults.failpoints import Point, hit
from swift_ft.observe.waits import waiting
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, SavedPart, State
from swift_ft.recovery.orders import WorkerOrder, commit_due, is_complete
from swift_ft.recovery.topology import replica_sets
from swift_ft.runtime.checkpoints.ownership import end_if_taken_over
from swift_ft.storage.retry import is_outage, is_transient, retry

_logger = logging.getLogger(__name__)

_COMMIT_S = 600.0
"""Seconds for which a commit is retried while the store does not answer, beyond the store's own patience.

At least: it is retried for as long as workers wait for the last one.
"""


class Commits:
    """Writes the markers of checkpoints, where that is this worker's duty, and waits for them.

    Args:
        participant: this worker's part in the job.
        folder: where checkpoints are committed.
        keep: committed checkpoints that all workers can return to.
        background: runs what waits for the store.
    """

    def __init__(
        self, participant: Participant, folder: CheckpointFolder, background: ThreadPoolExecutor, *, keep: int
    ) -> None:
        self._participant = participant
        self._folder = folder
        self._keep = keep
        self._background = background
        self._begun: set[tuple[int, int]] = set()  # iteration and epoch; owner: the journal thread

    def on_change(self, state: State) -> None:
        """Begin the commit that is due, if any. Called in the journal thread."""
        due = commit_due(state, self._participant.context.rank)
        if due is not None and (due, state.checkpoints.epoch) not in self._begun:
            self._begun.add((due, state.checkpoints.epoch))
            self._background.submit(self._commit, due, state)

    def found(self, iterations: Sequence[int]) -> None:
        """Report the checkpoints of an earlier run, which this one continues: oldest first."""
        if iterations:
            *earlier, newest = iterations
            self._participant.append(
                ev.CheckpointCommitted(iteration=newest, epoch=0, keep=self._keep, earlier=tuple(earlier))
            )

    def wait(self, iteration: int, timeout_s: float) -> None:
        """Wait until a checkpoint is committed. Logs a warning if it is not, within the deadline.

        Call it once all workers have reported their parts. A part that is missing then is never written: its
        worker was lost, and no replica has the state of that iteration any more.
        """

        def over(state: State) -> bool:
            return _is_committed(state, iteration) or not is_complete(state, iteration)

        _warn_unless_committed(self._participant.wait_for(over, timeout_s), iteration)

    def wait_while_others_save(self, iteration: int, generation: int, timeout_s: float) -> None:
        """Wait until a checkpoint is committed, or cannot be any more: a worker has ended without its part.

        Logs a warning if it is not committed, as :meth:`wait` does.

        Args:
            iteration: its.
            generation: the one in which this worker has saved.
            timeout_s: how long at most.
        """

        def over(state: State) -> bool:
            parts = state.checkpoints.parts.get(iteration, Map[int, SavedPart]())
            gone = [rank for rank in state.membership.ended if rank not in parts]
            cannot_be = bool(gone) or state.generation != generation or state.phase == Phase.ENDED
            return cannot_be or _is_committed(state, iteration)

        what = f"the parts of others, and the commit of checkpoint {iteration}"
        with waiting(what, timeout_s, flag="--checkpoint-timeout"):
            state = self._participant.wait_for(over, timeout_s)
        _warn_unless_committed(state, iteration)

    def _commit(self, iteration: int, state: State) -> None:
        """Write the marker, then append the event. Older logs may be deleted only after that."""

        def write() -> None:
            now = self._participant.state
            if self._participant.order(now) in (WorkerOrder.DIE, WorkerOrder.STOP):
                raise FencedError("its worker was replaced in the meantime, or the job has ended")
            if now.checkpoints.epoch != state.checkpoints.epoch:
                raise FencedError("all workers have gone back to an older one in the meantime")
            end_if_taken_over(self._folder.store, self._participant)
            parts = dict(sorted(state.checkpoints.parts[iteration].items()))
            self._folder.commit(
                iteration,
                {rank: part.path for rank, part in parts.items()},
                self._participant.context.run_id,
                {part.path: part.digest for part in parts.values() if part.digest},
                _saved_layers(state),
                state.layouts.present,
            )

        try:
            hit(Point.COMMIT, iteration)
            what = f"{self._folder.store.url} to take the marker of checkpoint {iteration}"
            patience_s = max(_COMMIT_S, self._participant.context.config.checkpoint_timeout_s)
            retry(write, patience_s, _is_retryable, what=what)
            self._participant.append(
                ev.CheckpointCommitted(iteration=iteration, epoch=state.checkpoints.epoch, keep=self._keep)
            )
        except Exception as error:
            _logger.warning(
                "The checkpoint of iteration %d could not be committed: %s",
                iteration,
                error,
                extra={"event": "commit_failed", "iteration": iteration},
            )


def _is_committed(state: State, iteration: int) -> bool:
    """Of a run that is shorter than it takes to its first regular checkpoint none is waited for."""
    return iteration == 0 or state.checkpoints.covers(iteration)


def _warn_unless_committed(state: State | None, iteration: int) -> None:
    """Say that a wait, whose last state this is, was in vain. It is None if the wait took too long."""
    if state is None or not _is_committed(state, iteration):
        _logger.warning(
            "The last checkpoint, of iteration %d, is not committed.",
            iteration,
            extra={"event": "last_checkpoint_not_committed", "iteration": iteration},
        )


def _saved_layers(state: State) -> dict[int, tuple[int, ...]]:
    """The layers of workers that save their own part, and do not only name that of a replica."""
    placed, statuses = state.layouts.placed, state.round.statuses
    others = {rank for replicas in replica_sets(statuses) for rank in replicas[1:]}
    return {rank: layers for rank, layers in placed.items() if rank not in others}


def _is_retryable(error: BaseException) -> bool:
    return (is_transient(error) or is_outage(error)) and not isinstance(error, SwiftError)
