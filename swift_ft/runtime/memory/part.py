"""Checkpoints in the memory of other machines, as a part of a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from swift_ft.recovery.events import StatusReported
from swift_ft.runtime.memory.memory_checkpoints import MemoryCheckpoints
from swift_ft.runtime.worker.part import Part, Round, StepInfo


class MemoryPart(Part):
    """See :class:`swift_ft.runtime.worker.part.Part`.

    Args:
        snapshots: copies of the worker's state, and those of another worker that it holds.
        sharded: whether the state has shards, which can be cut for another number of workers.
    """

    name = "memory"

    def __init__(self, snapshots: MemoryCheckpoints, sharded: Callable[[], bool]) -> None:
        self._snapshots = snapshots
        self._sharded = sharded

    def boundary(self, step: StepInfo) -> None:
        self._snapshots.completed(step.completed)

    def report(self, report: StatusReported) -> StatusReported:
        kept, held, held_of = self._snapshots.report()  # they stay as they are from now on
        copies = self._snapshots.active and self._sharded()
        return replace(report, kept=kept, held=held, held_of=held_of, copies=copies)

    def live(self, round: Round) -> None:
        self._snapshots.live(round.state)

    def close(self) -> None:
        self._snapshots.close()
