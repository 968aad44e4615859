"""Measurements of a worker, as a part of it: its own work, its pace, its history, its progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

from swift_ft.coordination.agent_channel import agent_channel
from swift_ft.coordination.progress import ProgressBoard
from swift_ft.coordination.recovery_trace import RecoveryTrace
from swift_ft.costs.slow_links import LinkSample
from swift_ft.logging.stats import IterationStats
from swift_ft.observe.spans import FIRST_ITERATION, recorder
from swift_ft.recovery.job_state import State
from swift_ft.recovery.plan import RecoveryMode
from swift_ft.runtime.data.dealing import DealtBatches
from swift_ft.runtime.measures.profiler import Profiler
from swift_ft.runtime.measures.work_history import WorkHistory
from swift_ft.runtime.pipeline.logged_pipeline import LoggedPipeline
from swift_ft.runtime.pipeline.worker_log import WorkerLog
from swift_ft.runtime.replicas.replicas import Replicas
from swift_ft.runtime.worker.part import Interruption, Part, Round, StepInfo
from swift_ft.runtime.worker.ports import Job
from swift_ft.runtime.worker.status import WorkerStatus

_REMEMBERED = 5
"""Iterations whose median says how long this worker takes: an odd number."""


class MeasuresPart(Part):
    """See :class:`swift_ft.runtime.worker.part.Part`.

    Args:
        status: knows which iteration the state is at.
        job: knows the generation.
        log: counts bytes.
        history: of its work, which the store keeps.
        profiler: measures iterations, and links at the start.
        own_work: the time that it takes without waits.
        trace: ends the recording of a recovery.
        progress: where it publishes what it does.
        link: returns the newest sample of its busiest link.
        sent: payload bytes to each other machine in the step that began last; None without a pipeline.
        write_s: for the last measurements to be written.
    """

    name = "measures"

    def __init__(
        self,
        status: WorkerStatus,
        job: Job,
        log: WorkerLog,
        history: WorkHistory,
        profiler: Profiler,
        own_work: OwnWork,
        trace: RecoveryTrace,
        progress: ProgressBoard,
        link: Callable[[], LinkSample | None],
        sent: Callable[[], Mapping[int, int] | None],
        *,
        write_s: float,
    ) -> None:
        self._status = status
        self._job = job
        self._log = log
        self._history = history
        self._profiler = profiler
        self._own_work = own_work
        self._trace = trace
        self._progress = progress
        self._link = link
        self._sent = sent
        self._write_s = write_s
        self._began = 0  # when the last step began, by the clock of the trace

    def begin(self, step: StepInfo) -> None:
        self._history.begin(step.generation, replaying=step.replayed)
        self._began = recorder.now()
        if not step.replayed:
            recorder.lap(FIRST_ITERATION, iteration=step.iteration)  # the only one in a recording
        own_s, step_s = self._own_work.medians()
        link = self._link()
        self._progress.publish(
            step.iteration,
            "replay" if step.replayed else "live",
            until=step.until,
            own_s=own_s,
            step_s=step_s,
            link=asdict(link) if link is not None else None,
        )

    def completed(self, step: StepInfo) -> None:
        if (channel := agent_channel()) is not None:
            channel.progress(iteration=step.completed, **self._log.heartbeat())
        self._history.complete(step.completed, step.cost, replaying=step.replayed)
        self._own_work.complete(step.cost, replayed=step.replayed)
        if step.replayed:
            recorder.add("replay an iteration", self._began, detail=True, iteration=step.iteration)
            return
        if recorder.active:
            self._trace.end(step.generation)
        self._profiler.add(step.cost, self._sent())

    def interrupted(self, interruption: Interruption) -> None:
        if interruption.in_step:
            self._history.interrupted()

    def settle(self, state: State) -> None:
        self._progress.publish(self._status.iteration, "waiting")

    def prepare(self, round: Round) -> None:
        if round.plan.new_layout is not None:
            self._own_work.forget()

    def join(self, round: Round) -> str | None:
        return self._profiler.measure() if round.plan.mode == RecoveryMode.START else None

    def finish(self) -> None:
        if recorder.active:  # there was no iteration left to do
            self._trace.end(self._job.state.generation)
        self._history.write()
        self._progress.publish(self._status.iteration, "finished", bytes_logged=self._log.bytes_logged)

    def close(self) -> None:
        self._profiler.close(self._write_s)


class OwnWork:
    """Measures the last iterations.

    Args:
        pipeline: the worker's stages; None without any.
        replicas: measure their waits.
        dealt: the batches that are dealt to them.
    """

    def __init__(self, pipeline: LoggedPipeline | None, replicas: Replicas, dealt: DealtBatches) -> None:
        self._pipeline = pipeline
        self._replicas = replicas
        self._dealt = dealt
        self._own_s: deque[float] = deque(maxlen=_REMEMBERED)  # without waits
        self._step_s: deque[float] = deque(maxlen=_REMEMBERED)  # with them

    def complete(self, stats: IterationStats, *, replayed: bool) -> None:
        """An iteration is complete. One that was replayed says nothing of those that follow."""
        own_s = self._pipeline.take_computed_s() if self._pipeline is not None else stats.step_s
        own_s -= self._replicas.take_waited_s()
        if self._dealt:  # what is left grows with the share of a batch, and is compared with other shares
            own_s -= self._replicas.take_since_averages_s()
        if not replayed:
            self._own_s.append(max(0.0, own_s))
            self._step_s.append(stats.step_s)

    def forget(self) -> None:
        """Drop all samples: the work changes, so they say nothing about what follows."""
        self._own_s.clear()
        self._step_s.clear()

    def medians(self) -> tuple[float, float] | tuple[None, None]:
        """Seconds of an iteration, without waits and with them; None as long as too few are known."""
        if len(self._own_s) < _REMEMBERED:
            return None, None
        return _median(self._own_s), _median(self._step_s)


def _median(odd: Iterable[float]) -> float:
    """In a fraction of the time that Python's takes: it is asked in each step."""
    return sorted(odd)[_REMEMBERED // 2]
