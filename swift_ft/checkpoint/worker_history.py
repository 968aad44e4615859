"""A worker's history in the store: its work in each generation, for tools that look when the run is gone.

The file (`checkpoint/worker_files.py`) is written again whenever the worker begins to train in a generation,
saves a checkpoint, is interrupted, or ends. A worker that is killed leaves what it had written before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from swift_ft.checkpoint.worker_files import of_rank

HISTORIES = re.compile(r"rank-\d{5,}\.g\d{4,}\.json")
"""The names of all histories of a run."""


@dataclass(frozen=True, slots=True)
class GenerationWork:
    """One worker's work in one generation, as far as it is known.

    Attributes:
        generation: the membership that it worked in.
        began: when its first live step began, in Unix seconds by its own clock; None if none did.
        until: when its last live step ended; None if none did.
        steps: live steps that it completed.
        iteration: iterations that its state had completed after the last step.
        interrupted: when the step began that an interruption ended; None if there was none.
        held_back_s: how long its live steps waited for room in the log's budget.
        saving_s: how long its training stood still for checkpoints: to copy the state, and to take digests.
        log_messages: messages that it logged, also in a replay.
        log_bytes: their payload.
        replayed: steps of a replay.
        replay_s: time in these.
    """

    generation: int
    began: float | None = None
    until: float | None = None
    steps: int = 0
    iteration: int = 0
    interrupted: float | None = None
    held_back_s: float = 0.0
    saving_s: float = 0.0
    log_messages: int = 0
    log_bytes: int = 0
    replayed: int = 0
    replay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerHistory:
    """The work of one process.

    Attributes:
        run_id: the run.
        rank: the worker.
        started_in: the generation in which the process was started.
        generations: in order, those in which it took a step.
    """

    run_id: str
    rank: int
    started_in: int
    generations: tuple[GenerationWork, ...]

    @property
    def file(self) -> str:
        """Its name."""
        return of_rank(self.rank, f"g{self.started_in:04d}")
