"""When a worker saves its part of the global checkpoint, and who saves it for all replicas (paper §3).

Everybody saves every so many iterations. In between anybody can ask for a checkpoint: once one is committed,
older logs can go. Whoever learns of that too late does not save, and the checkpoint is never committed; the
parts of the others are deleted when a later one is.
"""

from __future__ import annotations

import time

from swift_ft.config import WorkerContext
from swift_ft.recovery import events as ev
from swift_ft.recovery.checkpoint import Checkpointer
from swift_ft.recovery.coordinator import Coordinator
from swift_ft.recovery.job_state import Phase
from swift_ft.recovery.ladder import keeper_of
from swift_ft.recovery.worker_log import WorkerLog

__all__ = ["Saver"]

_LOOK_S = 0.1
"""Between two looks whether somebody was lost, while a part is being written."""


class Saver:
    """Saves every so many iterations and when somebody asks for it, and tells when a part is durable.

    Args:
        context: the worker's place.
        coordinator: who is told.
        checkpointer: writes and reads the part.
        log: its generation is in the part's name.
        every: iterations between two regular checkpoints.
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
        self.every = every

    def due(self, iteration: int) -> bool:
        """Whether a checkpoint follows the completion of this many iterations: as ever, or as asked for."""
        return self._regular(iteration) or iteration == self._coordinator.state.wanted

    def _regular(self, iteration: int) -> bool:
        return iteration % self.every == 0

    def ask(self, iteration: int, generation: int, reason: str) -> None:
        """Ask everybody for a checkpoint before the regular one is due.

        To be called between two live steps, after each as long as the need lasts: nothing is told while
        a checkpoint is on its way, and it is told again where one was missed, or forgotten in a recovery.

        Args:
            iteration: completed iterations.
            generation: that this worker trains in.
            reason: why, in words.
        """
        state, at = self._coordinator.state, iteration + ev.WANTED_AHEAD
        soon = any(self._regular(i) for i in range(iteration, at + 1))
        pending = state.wanted is not None and iteration <= state.wanted  # it would not be taken up
        if state.phase != Phase.LIVE or soon or pending or not self._checkpointer.wait(0.0):
            return
        self._coordinator.tell(ev.CheckpointWanted(self._context.rank, at, generation, reason))

    def save(self, iteration: int) -> None:
        """Begin to save the state, unless that checkpoint is committed already. One replica saves for all."""
        state = self._coordinator.state
        if state.committed is not None and iteration <= state.committed:
            return
        rank, epoch, generation = self._context.rank, state.epoch, self._log.generation
        keeper = keeper_of(rank, state.reports)
        path = self._checkpointer.folder.part(iteration, keeper, generation)

        def durable() -> None:
            self._coordinator.tell(ev.Durable(rank, iteration, epoch, generation, path))

        if rank == keeper:
            self._checkpointer.save(iteration, path, durable)
        else:  # nothing is committed before the keeper has told the same
            durable()

    def wait_for_part(self) -> None:
        """Wait for a part that is being written, to be told of before anything that is told afterwards."""
        deadline = time.monotonic() + self._context.timeouts.checkpoint_s
        while not self._checkpointer.wait(_LOOK_S) and time.monotonic() < deadline:
            if self._coordinator.disturbed(self._coordinator.state):
                return

    def finish(self, iteration: int) -> None:
        """When all have told of their last parts, wait for the commit of the last regular checkpoint.

        Not for that of an early one: others may have learned of it too late.
        """
        last = iteration - iteration % self.every
        self._coordinator.wait_for_commit(last, self._context.timeouts.checkpoint_s)
