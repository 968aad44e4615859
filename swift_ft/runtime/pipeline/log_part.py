"""A worker's log of messages as a part of it: sealed before a report, opened with each generation (§5.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from swift_ft.observe.spans import recorder
from swift_ft.recovery.events import StatusReported, WorkerReady
from swift_ft.recovery.job_state import State
from swift_ft.runtime.pipeline.worker_log import WorkerLog
from swift_ft.runtime.worker.part import Interruption, Part, StepInfo


class LogPart(Part):
    """See :class:`swift_ft.runtime.worker.part.Part`.

    Args:
        log: the worker's.
        group: the recovery group of its machine, in which no message is logged.
        must_be_uploaded: whether the store must have the log before a report. State that comes from a
            replica, and not from a replay, is not logged again.
    """

    name = "log"

    def __init__(self, log: WorkerLog, group: int, must_be_uploaded: Callable[[], bool]) -> None:
        self._log = log
        self._group = group
        self._must_be_uploaded = must_be_uploaded

    def begin(self, step: StepInfo) -> None:
        self._log.messages.begin_iteration()

    def completed(self, step: StepInfo) -> None:
        step.stats = self._log.messages.end_iteration()

    def why_checkpoint(self, committed: int | None) -> str:
        if self._log.nearly_full():
            return "the log nears its budget of disk"
        return self._log.why_checkpoint(committed)

    def interrupted(self, interruption: Interruption) -> None:
        if interruption.in_step:
            self._log.messages.interrupted()

    def settle(self, state: State) -> None:
        with recorder.span("seal the log"):
            self._log.seal_and_offer(state.round.asked_in, uploaded=self._must_be_uploaded())

    def report(self, report: StatusReported) -> StatusReported:
        return replace(report, group=self._group)

    def open(self, state: State, begin: int) -> None:
        with recorder.span("open own log"):
            self._log.open(state.generation, since=state.checkpoints.log_since, begin=begin)

    def ready(self, ready: WorkerReady) -> WorkerReady:
        from_peers, from_store = self._log.fetch_stats.take()
        return replace(ready, from_peers=from_peers, from_store=from_store)

    def finish(self) -> None:
        self._log.flush()

    def close(self) -> None:
        self._log.close()
