"""Replays (alone, joint, or parallel), and a survivor's help in one (paper §5.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

import torch

from swift_ft.coordination.groups import Groups
from swift_ft.coordination.participant import Participant
from swift_ft.coordination.progress import ProgressBoard
from swift_ft.errors import CannotHelpError, RecoveryError
from swift_ft.observe.spans import recorder
from swift_ft.recovery import events as ev
from swift_ft.recovery.helpers import ParallelReplay
from swift_ft.recovery.job_state import State
from swift_ft.recovery.plan import Task
from swift_ft.runtime.pipeline.logged_pipeline import LoggedPipeline
from swift_ft.runtime.replicas.replicas import Replicas
from swift_ft.runtime.worker.status import WorkerStatus
from swift_ft.torch_adapters.comm_errors import interruption_of

T = TypeVar("T")


class Replays:
    """A worker's part in replays: see :class:`swift_ft.runtime.worker.ports.Replays`.

    Args:
        pipeline: its stages.
        status: of the worker's state.
        replicas: the replicas of its model, if there are any.
        participant: its part in the job.
        groups: the process groups.
        progress: where it publishes what it does.
        own: returns all large state of this worker.
        aside: within its block, the script's code computes for others, and leaves no change in its objects.

    Attributes:
        until: the number of completed iterations at which its own replay ends.
        parts_from: from this of the script's parts on, those before the next live step are done live; None if
            all are done.
        replayed: iterations of that replay which it has completed and not reported.
    """

    def __init__(
        self,
        pipeline: LoggedPipeline,
        status: WorkerStatus,
        replicas: Replicas,
        participant: Participant,
        groups: Groups,
        progress: ProgressBoard,
        *,
        own: Callable[[], Iterable[torch.Tensor]],
        aside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._pipeline = pipeline
        self._status = status
        self._replicas = replicas
        self._participant = participant
        self._groups = groups
        self._progress = progress
        self._own = own
        self._aside = aside
        self.until = 0
        self.parts_from: int | None = None
        self.replayed = 0

    @property
    def active(self) -> bool:
        """Whether the next step takes its messages from the log, or completes one that was interrupted."""
        return self._pipeline.replaying

    @property
    def behind(self) -> bool:
        """Whether others have left this state behind: not where a step only has to be completed."""
        return self._pipeline.replaying and self._pipeline.shared_layers is None

    @property
    def joint(self) -> bool:
        """Whether other workers take part in the replay."""
        return self._pipeline.joint

    def end(self) -> None:
        """It is complete, or it cannot continue."""
        self._pipeline.end_replay()

    def begin(self, state: State, task: Task, shared: ParallelReplay | None) -> bool:
        """Take the messages of the next steps from the neighbours' logs.

        Returns:
            False if another generation is due before the replay begins.

        Raises:
            RecoveryError: if a log does not have what is needed.
        """
        self.replayed = 0
        self._participant.watch_recovery(state.generation)
        with recorder.span("open logs"):
            self._pipeline.begin_replay(state, task)
        self.until = task.replay_until
        assert state.plan is not None
        self.parts_from = state.plan.parts_from
        self._status.known = True
        if shared is not None:
            join, loaded = self._pipeline.shared_replay.join, task.load is not None
            return self._take_part(state, shared, lambda: join(state, shared, loaded=loaded))
        if (
            not task.replay_group and self._groups.shorten_timeout()
        ):  # a replay alone talks to no other worker
            return True
        replay_group = task.replay_group or (self._participant.context.rank,)
        if not self._groups.enter_replay_group(state.generation, replay_group):
            return False
        # From the buckets of that iteration, so that sums round as they did (decision 38).
        self._replicas.reset(task.begin)
        return True

    def help(self, state: State, shared: ParallelReplay, iteration: int) -> bool:
        """Compute for the workers that replay. This worker's own state is unchanged afterwards.

        So are the objects of its script, such as a loss function that counts, also if help ends early.

        Args:
            shared: the replay.
            iteration: iterations that this worker has completed.

        Returns:
            Whether the replay is complete. Otherwise it was interrupted.
        """
        self._progress.publish(iteration, "helping")
        self._participant.watch_recovery(state.generation)
        own, prepare = self._own(), self._pipeline.shared_replay.prepare_help
        with ExitStack() as until:
            # First, so that what is put back afterwards is in memory again.
            until.enter_context(self._aside())
            # Raised in the group only: there _take_part() tells the job that this worker cannot help.
            compute = _tried(lambda: prepare(state, shared, own, until))
            done = self._take_part(state, shared, lambda: compute()())
        if done:
            # Owners may still read what it has sent (decision 27).
            self._groups.keep()
        return done

    def _take_part(self, state: State, shared: ParallelReplay, act: Callable[[], object]) -> bool:
        """Act in the group of a shared replay. False if that failed; the journal then has the reason."""
        if not self._groups.enter_replay_group(state.generation, shared.members, with_helpers=True):
            return False
        try:
            act()
        except Exception as error:  # also of the script's `build`
            interruption = interruption_of(error)
            its_own = interruption is None and not isinstance(error, CannotHelpError)
            if isinstance(error, RecoveryError) and its_own:
                self._groups.leave()
                raise
            cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        else:
            return True
        # Only now, when the traceback is gone: it holds on to the group.
        if interruption is not None:
            self._groups.on_connection_broken(interruption)
        else:
            self._groups.leave()
            rank = self._participant.context.rank
            self._participant.append(ev.HelpDeclined(rank=rank, generation=state.generation, reason=cause))
        return False


def _tried(act: Callable[[], T]) -> Callable[[], T]:
    """Act at once, and return what returns the result, or raises the error, where that is expected."""
    outcome: Future[T] = Future()
    try:
        outcome.set_result(act())
    except Exception as error:
        outcome.set_exception(error)
    return outcome.result
