"""When a worker saves its part of the global checkpoint, and who saves it for all replicas (paper §3)."""

from __future__ import annotations

from swift_ft.config import WorkerContext
from swift_ft.recovery import events as ev
from swift_ft.recovery.checkpoint import Checkpointer
from swift_ft.recovery.coordinator import Coordinator
from swift_ft.recovery.ladder import keeper_of
from swift_ft.recovery.worker_log import WorkerLog

__all__ = ["Saver"]


class Saver:
    """Saves every so many iterations, and tells when a part is durable.

    Args:
        context: the worker's place.
        coordinator: who is told.
        checkpointer: writes and reads the part.
        log: its generation is in the part's name.
        every: iterations between two checkpoints.
    """

    def __init__(
        self,
        context: WorkerContext,
        coordinator: Coordinator,
        checkpointer: Checkpointer,
        log: WorkerLog,
        *,
        every: int,
    ) -> None:
        self._context = context
        self._coordinator = coordinator
        self._checkpointer = checkpointer
        self._log = log
        self._every = every

    def due(self, iteration: int) -> bool:
        """Whether a checkpoint follows the completion of this many iterations."""
        return iteration % self._every == 0

    def save(self, iteration: int) -> None:
        """Begin to save the state, unless that checkpoint is committed already. One replica saves for all."""
        state = self._coordinator.state
        if state.committed is not None and iteration <= state.committed:
            return
        rank, epoch = self._context.rank, state.epoch
        keeper = keeper_of(rank, state.reports)
        path = self._checkpointer.folder.part(iteration, keeper, self._log.generation)

        def durable() -> None:
            self._coordinator.tell(ev.Durable(rank, iteration, epoch, path, self._context.launched))

        if rank == keeper:
            self._checkpointer.save(iteration, path, durable)
        else:  # nothing is committed before the keeper has told the same
            durable()

    def finish(self, iteration: int) -> None:
        """Wait for the last iteration's checkpoint, if there is one."""
        if self.due(iteration):
            flush_s = self._context.timeouts.flush_s
            self._checkpointer.wait(flush_s)
            self._coordinator.wait_for_commit(iteration, flush_s)
