"""Keeps the history of this process's work, for those who ask when the run is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from swift_ft.checkpoint.worker_history import GenerationWork, WorkerHistory
from swift_ft.config.worker_context import WorkerContext
from swift_ft.logging import IterationStats


class WorkHistory:
    """The history of this worker, by generation. Owner: the training thread.

    Args:
        context: the worker's place.
        write: takes the history so far, and returns at once.
        now: Unix seconds.
    """

    def __init__(
        self,
        context: WorkerContext,
        write: Callable[[WorkerHistory], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._context = context
        self._write = write
        self._now = now
        self._closed: list[GenerationWork] = []
        self._open = GenerationWork(0)
        self._step: float | None = None  # when the live step began that has not ended

    def begin(self, generation: int, *, replaying: bool) -> None:
        """A step begins."""
        if generation != self._open.generation:
            if self._open.generation:
                self._closed.append(self._open)
            self._open = GenerationWork(generation)
        self._step = None if replaying else self._now()
        if self._open.began is None and not replaying:
            self._open = replace(self._open, began=self._step)
            self.write()  # a worker that is killed before its next checkpoint has noted this much

    def complete(self, iteration: int, stats: IterationStats, *, replaying: bool) -> None:
        """It ended.

        Args:
            iteration: iterations that the state has completed.
            stats: what logging cost in the step.
            replaying: it was a replayed step.
        """
        work = self._open
        more: dict[str, Any] = (
            {"replayed": work.replayed + 1, "replay_s": work.replay_s + stats.step_s}
            if replaying
            else {
                "steps": work.steps + 1,
                "until": self._now(),
                "held_back_s": work.held_back_s + stats.held_back_s,
            }
        )
        self._step = None
        self._open = replace(
            work,
            iteration=iteration,
            log_messages=work.log_messages + stats.messages,
            log_bytes=work.log_bytes + stats.bytes,
            **more,
        )

    @contextmanager
    def saving(self, *, replaying: bool) -> Iterator[None]:
        """The state is saved in the block, as far as training waits for it."""
        began = time.monotonic()
        try:
            yield
        finally:
            took = 0.0 if replaying else time.monotonic() - began
            self._open = replace(self._open, saving_s=self._open.saving_s + took)
            self.write()

    def interrupted(self) -> None:
        """The step was interrupted."""
        self._open = replace(self._open, interrupted=self._step)
        self._step = None
        self.write()

    def write(self) -> None:
        """Write what is known so far, soon."""
        works = (*self._closed, self._open) if self._open.generation else tuple(self._closed)
        self._write(WorkerHistory(self._context.run_id, self._context.rank, self._context.started_in, works))
