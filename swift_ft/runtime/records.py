"""Records of steps, such as the lines of a log file, that are given once: see `Step.once()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.agent_channel import agent_channel


class Records:
    """Gives the records of each iteration, unless they are known to be given.

    The agent is told, and outlives the worker. With each sign of life it tells the machines that watch it,
    and the report of a machine's loss has it. So a process that comes in the place of this one knows.

    Args:
        context: the worker's place, with what is known to be given. A worker that is rebuilt without its job
            gives none.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._rank = context.rank
        self._silent = context.offline is not None
        self._next = context.recorded  # the first iteration whose records are not given yet

    def give(self, iteration: int, records: Iterable[Callable[[], object]]) -> None:
        """Give those of an iteration that is complete."""
        if self._silent or iteration < self._next:
            return
        self._next = iteration + 1
        given = [record() for record in records]
        if given and (channel := agent_channel()) is not None:
            channel.mention(recorded={"rank": self._rank, "before": self._next})
