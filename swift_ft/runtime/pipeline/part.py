"""A worker's stages, and its log of messages, as parts of it (paper §5)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from swift_ft.observe.spans import recorder
from swift_ft.recovery.events import StatusReported, WorkerReady
from swift_ft.recovery.job_state import State
from swift_ft.runtime.pipeline.logged_pipeline import LoggedPipeline
from swift_ft.runtime.pipeline.worker_log import WorkerLog
from swift_ft.runtime.worker.part import Interruption, Part, Round, StepInfo
from swift_ft.runtime.worker.status import WorkerStatus
from swift_ft.torch_adapters.pipelining.stage_metadata import Undo

_logger = logging.getLogger(__name__)


class PipelinePart(Part):
    """See :class:`swift_ft.runtime.worker.part.Part`.

    Args:
        pipeline: the worker's stages.
        status: knows which iteration the state is at.
        log: knows its own gaps.
        replica: the number of this pipeline among its replicas.
        note_variables: notes the script's variables, and returns what puts them back.
        dealt: a session deals all batches, by the numbers of microbatches.
        rank: the worker.
    """

    name = "pipeline"

    def __init__(
        self,
        pipeline: LoggedPipeline,
        status: WorkerStatus,
        log: WorkerLog,
        replica: Callable[[], int],
        note_variables: Callable[[], Undo],
        *,
        dealt: bool,
        rank: int,
    ) -> None:
        self._pipeline = pipeline
        self._status = status
        self._log = log
        self._replica = replica
        self._note_variables = note_variables
        self._dealt = dealt
        self._rank = rank

    def start(self) -> None:
        if self._rank == 0 and (reason := self._pipeline.replay_shards.why_no_helpers):
            _logger.info("parallel recovery is off: %s", reason, extra={"event": "parallel_recovery_off"})
        self._pipeline.put_back_after_trials(self._note_variables)

    def begin(self, step: StepInfo) -> None:
        self._pipeline.begin(step.iteration, self._replica())

    def completed(self, step: StepInfo) -> None:
        self._pipeline.completed()

    def why_checkpoint(self, committed: int | None) -> str:
        inexact = self._pipeline.shared_replay.needs_checkpoint(committed)
        return "a stage was rebuilt with other roundings" if inexact else ""

    def interrupted(self, interruption: Interruption) -> None:
        self._pipeline.reset()

    def report(self, report: StatusReported) -> StatusReported:
        pipeline, iteration = self._pipeline, self._status.iteration
        shared, gap_before = pipeline.shared_layers, self._log.gap_before(iteration)
        if not report.live and pipeline.shared_replay.has_rounded(iteration):
            report = replace(report, iteration=None)  # it begins again at the checkpoint
        return replace(
            report,
            stages=pipeline.stages,
            pipeline_known=pipeline.shapes_known,
            pipeline=pipeline.pipeline,
            can_resend=pipeline.can_resend(iteration - 1) and gap_before < iteration,
            max_replay_shards=pipeline.replay_shards.most,
            linked=pipeline.linked,
            log_gap_before=gap_before,
            log_gap_reason=self._log.why_gap,
            together=tuple(sorted(pipeline.script.together)),
            together_reason=pipeline.script.why,
            layers=pipeline.stack.count if pipeline.stack is not None else 0,
            completes=shared is not None and shared.completes(iteration) and not self._status.updated,
            **self._facts_of_pipeline(),
        )

    def _facts_of_pipeline(self) -> dict[str, Any]:
        """Of each pipeline one worker says them: in large jobs all together would be much."""
        stack, shared = self._pipeline.stack, self._pipeline.shared_layers
        if stack is None or 0 not in stack.stages:
            return {}
        found: dict[str, Any] = {"cut": stack.begun_cut, "min_stages": stack.min_stages}
        found["takes_unlike"] = self._dealt or stack.takes_counts
        if shared is not None and stack.takes_microbatches:
            found["microbatches"] = shared.counts[stack.pipeline]
        return found

    def prepare(self, round: Round) -> None:
        with recorder.span("prepare the pipeline"):
            self._pipeline.prepare(round.state, round.plan)

    def join(self, round: Round) -> str | None:
        if not round.task.resend_from_log:
            return None
        with recorder.span("resend"):
            return self._pipeline.resend_from_log(round.state, round.plan)


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
        self._log.messages.muted = step.computation == 1
        self._log.messages.begin_iteration()

    def again(self, step: StepInfo) -> None:
        self._log.messages.interrupted()

    def completed(self, step: StepInfo) -> None:
        step.stats = self._log.messages.end_iteration()
        if step.computation == 1:  # it counts although it was to be computed again
            self._log.left_out(step.completed)
        if not step.replayed:
            # Not before: workers that are behind read what the script communicated only as they repeat it.
            self._log.withdraw()

    def why_checkpoint(self, committed: int | None) -> str:
        if self._log.nearly_full():
            return "the log nears its budget of disk"
        return self._log.why_checkpoint(committed)

    def interrupted(self, interruption: Interruption) -> None:
        self._log.messages.muted = False
        if interruption.in_step:
            self._log.messages.interrupted()

    def settle(self, state: State) -> None:
        with recorder.span("seal the log"):
            self._log.seal_and_offer(state.round.asked_in, uploaded=self._must_be_uploaded())

    def report(self, report: StatusReported) -> StatusReported:
        return replace(report, group=self._group)

    def open(self, state: State, begin: int) -> None:
        with recorder.span("open own log"):
            self._log.messages.muted = False
            self._log.open(state.generation, since=state.checkpoints.log_since, begin=begin)

    def ready(self, ready: WorkerReady) -> WorkerReady:
        from_peers, from_store = self._log.fetch_stats.take()
        return replace(ready, from_peers=from_peers, from_store=from_store)

    def finish(self) -> None:
        self._log.flush()

    def close(self) -> None:
        self._log.close()
