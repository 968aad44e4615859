"""One worker's part in the protocol: follows the journal, waits for orders, says what was done.

The protocol decides, this acts. Orders that concern the training state itself (report, load, replay) are
carried out by the session, in the training thread; commits and clean-ups run in a thread of their own.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from torch.distributed import DistError

from swift_ft.config import EXIT_FENCED, WorkerContext
from swift_ft.errors import FencedError, GaveUpError, SwiftError
from swift_ft.launch.store_service import connect
from swift_ft.launch.worker import worker_line
from swift_ft.logging.retry import is_transient, patiently
from swift_ft.process_group import GenerationGroup
from swift_ft.recovery import events as ev
from swift_ft.recovery.checkpoint import CheckpointFolder
from swift_ft.recovery.claim import tidy_store
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.journal import Follower, Journal
from swift_ft.recovery.meeting import Meeting
from swift_ft.recovery.orders import WorkerOrder, commit_due, worker_order

__all__ = ["Coordinator"]

_LOOK_S = 0.02
"""Between two looks whether all that form a group are there: the store has no wait that an event ends."""

_COMMIT_S = 600.0
"""How long a store that does not answer is waited for, beyond its own patience."""


class Coordinator:
    """Connects a worker to the job.

    Args:
        context: the worker's place.
        folder: where checkpoints are committed.
        keep_checkpoints: committed checkpoints to keep.
        before_commit: told in the background just before a marker is written.
        on_committed: told in the background when a commit is known and the job is live: older logs can go.
    """

    def __init__(
        self,
        context: WorkerContext,
        folder: CheckpointFolder,
        *,
        keep_checkpoints: int,
        before_commit: Callable[[int], None],
        on_committed: Callable[[int], None],
    ) -> None:
        self.context = context
        self._folder = folder
        self._keep_checkpoints = keep_checkpoints
        self._before_commit = before_commit
        self._on_committed = on_committed
        client = partial(connect, context.host, context.port, context.run_id)
        self.rendezvous = client()
        self.group = GenerationGroup(
            self.rendezvous,
            rank=context.rank,
            world=context.world,
            timeout_s=context.timeouts.group_s,
            called_off=lambda: self.disturbed(self.state),
        )
        self._running: int | None = None
        self._meanwhile = WorkerOrder.RUN  # the order that holds while it runs
        self._commits_begun: set[tuple[int, int]] = set()
        self._cleaned = -1
        self._housekeeper = ThreadPoolExecutor(1, thread_name_prefix="swift-housekeeper")
        journal = Journal(client, by=f"worker {context.rank}")
        self.follower = Follower(journal, on_change=self._on_change)
        self.follower.start()
        if (line := worker_line()) is not None:
            line.tell(session=True)

    # ------------------------------------------------------------------------------- facts and orders

    @property
    def state(self) -> State:
        """The newest state of the job."""
        return self.follower.state

    def tell(self, event: ev.Event) -> State:
        """Tell everybody, and return the state that follows."""
        return self.follower.tell(event)

    def order(self, state: State) -> WorkerOrder:
        """What this worker has to do in a state."""
        context = self.context
        return worker_order(state, machine=context.machine, rank=context.rank, launched=context.launched)

    def disturbed(self, state: State) -> bool:
        """Whether the generation that this worker runs in is over."""
        return self._running is not None and (
            self.order(state) != self._meanwhile or state.generation != self._running
        )

    def next_order(self) -> tuple[WorkerOrder, State]:
        """Wait until there is something to do; leave nobody waiting for ever.

        Raises:
            GaveUpError: when the job has ended.
        """
        while True:
            state = self._wait(lambda s: self.order(s) != WorkerOrder.HOLD)
            order = self.order(state)
            if order == WorkerOrder.STOP:
                raise GaveUpError(f"The job has ended: {state.verdict and state.verdict.reason}")
            if order != WorkerOrder.HOLD:
                return order, state

    def _wait(self, condition: Callable[[State], bool]) -> State:
        """Wait for a condition. Whoever keeps all others waiting without progress is taken for lost."""
        timeouts = self.context.timeouts
        watched: tuple[int, Phase, dict[str, Any]] | None = None
        while True:
            recovering = self.state.phase == Phase.RECOVERING
            limit_s = timeouts.replay_s if recovering else timeouts.report_s
            state = self.follower.wait_for(condition, limit_s)
            if state is not None:
                return state
            state = self.state
            seen = (state.generation, state.phase, self.progress_of_all(state) if recovering else {})
            if seen == watched or (watched is None and not recovering):
                reason = f"no answer within {limit_s:g} s while {state.phase}"
                if missing := state.missing():
                    self.tell(ev.TimedOut(state.generation, state.phase, missing, reason))
            watched = seen

    def wait_for_finish(self) -> State:
        """Wait until everybody has completed the last iteration, or the generation is over."""
        while True:
            done = self.follower.wait_for(
                lambda s: len(s.finished) == s.world or self.disturbed(s), self.context.timeouts.report_s
            )
            if done is not None:
                return done  # else somebody still computes: heartbeats tell if it does not

    def wait_for_commit(self, iteration: int, timeout_s: float) -> None:
        """Wait until a checkpoint is committed; a warning if it is not in time.

        To be called when all have told of their parts: a part that is missing then will not come. Its keeper
        was lost while it wrote, and no replica stands at that iteration any more.
        """

        def done(state: State) -> bool:
            return (state.committed or 0) >= iteration

        def over(state: State) -> bool:
            return done(state) or len(state.durable.get(iteration, {})) < state.world

        state = self.follower.wait_for(over, timeout_s)
        if state is None or not done(state):
            warnings.warn(f"The last checkpoint, of iteration {iteration}, is not committed.", stacklevel=1)

    def lose_touch(self, cause: str) -> None:
        """After a broken connection: leave the group at once, neighbours wait for the end of our connections.

        Then wait for the word about who died.
        """
        self.group.leave()
        self.confirm_loss(cause)
        self.leave_group()

    def confirm_loss(self, cause: str) -> None:
        """After a broken connection, wait for the word about who died; without one it was the network."""
        context = self.context
        limit_s = context.timeouts.heartbeat_s + 5.0
        if self.follower.wait_for(self.disturbed, limit_s) is None and self._running is not None:
            self.tell(ev.Interrupted(context.rank, self._running, cause))
            self._wait(self.disturbed)

    # --------------------------------------------------------------------------------------- progress

    def tell_progress(self, iteration: int, mode: str, **facts: Any) -> None:
        """For the live view, and for those who wait for a replay."""
        self.rendezvous.set(
            f"progress/{self.context.rank}",
            json.dumps({"iteration": iteration, "mode": mode, "at": time.time(), **facts}),
        )

    def progress_of_all(self, state: State) -> dict[str, Any]:
        """What every worker told last."""
        keys = [f"progress/{rank}" for rank in range(state.world)]
        return {key: json.loads(self.rendezvous.get(key)) for key in keys if self.rendezvous.check([key])}

    # ---------------------------------------------------------------------------------------- groups

    def enter_group(self, generation: int) -> bool:
        """Form the group of a generation; False if it could not be formed and another one is due."""
        meeting = self._meeting(f"groups/{generation}", range(self.context.world))
        limit_s = self.context.timeouts.group_s
        if not self._meet(generation, WorkerOrder.RUN, meeting, limit_s):
            return False
        return self._enter(generation, meeting, lambda: self.group.join(generation))

    def enter_portion(self, generation: int, portion: tuple[int, ...], *, closely: bool = False) -> bool:
        """As :meth:`enter_group`, with those that replay together, once all of them are about to."""
        meeting = self._meeting(f"replays/{generation}", portion)
        if not self._meet(generation, WorkerOrder.EXECUTE, meeting):
            return False
        join = partial(self.group.join_portion, str(generation), portion, closely=closely)
        return self._enter(generation, meeting, join)

    def _meeting(self, place: str, ranks: Sequence[int]) -> Meeting:
        return Meeting(self.rendezvous, place, self.context.rank, ranks)

    def _meet(
        self, generation: int, meanwhile: WorkerOrder, meeting: Meeting, limit_s: float = math.inf
    ) -> bool:
        """Wait until all who form a group are about to; False if another generation is due first."""
        self._running, self._meanwhile = generation, meanwhile
        deadline = time.monotonic() + limit_s
        meeting.come()
        while not meeting.complete() and time.monotonic() < deadline:
            if self.follower.wait_for(self.disturbed, _LOOK_S) is not None:
                self._running = None
                return False
        return True

    def _enter(self, generation: int, meeting: Meeting, join: Callable[[], None]) -> bool:
        try:
            join()
        except (DistError, RuntimeError) as error:
            cause = f"the group could not be formed: {str(error).splitlines()[0]}"
            if absent := meeting.absent():
                cause += f"; worker {', '.join(map(str, absent))} did not come"
        else:
            self._running = generation
            if not self.disturbed(self.state):
                return True
            cause = ""  # a loss came in between: the journal says so already
        self._running = generation
        self.leave_group()
        if cause:
            self._running = generation
            self.confirm_loss(cause)
            self._running = None
        return False

    def leave_generation(self) -> None:
        """Let go of the group of a generation. A newcomer keeps the one that its script made.

        That one has never been connected; torch's stages ask it for ranks, during a replay too.
        """
        if self._running is not None:
            self.leave_group()

    def keep_group(self) -> None:
        """A joint replay is over here, but the others may still read what was sent: leave the group later."""
        self._running = None

    def leave_group(self) -> None:
        """Let go of the group, if there is one."""
        self._running = None
        self.group.leave()

    # ------------------------------------------------------------------------- in the follower's thread

    def _on_change(self, before: State, after: State) -> None:
        if self.order(after) == WorkerOrder.DIE:
            print(
                f"swift_ft: worker {self.context.rank} was replaced and ends here",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_FENCED)
        if self.disturbed(after):
            self.group.abort()
        due = commit_due(after, self.context.rank)
        if due is not None and (due, after.epoch) not in self._commits_begun:
            self._commits_begun.add((due, after.epoch))
            self._housekeeper.submit(self._commit, due, after)
        if after.phase == Phase.LIVE and after.committed is not None and after.committed > self._cleaned:
            self._cleaned = after.committed
            self._housekeeper.submit(self._clean, self._cleaned)

    def _commit(self, iteration: int, state: State) -> None:
        """Write the marker, then tell everybody. Only then may older logs go."""

        def write() -> None:
            if self.order(self.state) in (WorkerOrder.DIE, WorkerOrder.STOP):
                raise FencedError("its worker was replaced meanwhile, or the job has ended")
            self._folder.commit(iteration, state.durable[iteration], self.context.run_id)

        try:
            self._before_commit(iteration)
            patiently(write, _COMMIT_S, _may_pass)
            self.tell(ev.Committed(iteration, state.epoch))
        except Exception as error:
            warnings.warn(
                f"The checkpoint of iteration {iteration} could not be committed: {error}", stacklevel=1
            )

    def _clean(self, iteration: int) -> None:
        try:
            self._on_committed(iteration)
            if self.context.rank == 0:
                self._folder.clean(self._keep_checkpoints, iteration)
        except Exception as error:
            warnings.warn(
                f"Cleaning up after the checkpoint of iteration {iteration} failed: {error}", stacklevel=1
            )

    def _tidy(self) -> None:
        try:
            tidy_store(self._folder.store)
        except Exception as error:
            warnings.warn(f"Cleaning up after the last iteration failed: {error}", stacklevel=1)

    def settle(self, timeout_s: float) -> None:
        """After the last iteration: wait until the housekeeping is done; a warning if it is not in time."""
        if self.context.rank == 0:
            self._housekeeper.submit(self._tidy)
        try:
            self._housekeeper.submit(lambda: None).result(timeout_s)
        except TimeoutError:
            warnings.warn(
                f"Cleaning up after the last iteration took longer than {timeout_s:g} s: old files are left "
                "in the store.",
                stacklevel=1,
            )

    def announce_fault(self, fault: str) -> bool:
        """Tell that a test's fault is about to happen; False if it happened before."""
        try:
            if fault in self.state.injected:
                return False
            self.tell(ev.Injected(fault))
        except SwiftError:
            return False
        return True


def _may_pass(error: BaseException) -> bool:
    return is_transient(error) and not isinstance(error, SwiftError)
