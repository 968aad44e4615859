"""Deletes what no recovery needs any more: old log segments and old checkpoints."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from enum import StrEnum
from typing import ParamSpec, TypeVar

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.part_files import LocalParts
from swift_ft.checkpoint.store_claim import delete_left_logs, tidy_store
from swift_ft.checkpoint.worker_files import WorkerFiles
from swift_ft.errors import first_line
from swift_ft.observe.waits import waiting
from swift_ft.recovery.audit_orders import logs_needed_since
from swift_ft.recovery.job_state import Doubt, Phase, State
from swift_ft.runtime.pipeline.worker_log import WorkerLog

_logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Housekeeper(ThreadPoolExecutor):
    """A worker's one thread for what waits for the store.

    When a script has ended, Python lets executors finish what they have, and takes no more for them. The
    journal goes on while the script's own threads end: what it has for this thread then is cancelled.
    """

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="swift-housekeeper")

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Have something done after all that was submitted before."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:  # the script has ended
            cancelled: Future[_T] = Future()
            cancelled.cancel()
            return cancelled


class KeepLogs(StrEnum):
    """The choice of the logs that stay when a checkpoint is committed."""

    NEWEST = "newest"  # since the newest checkpoint: all that a recovery needs
    ALL = "all"  # since the oldest one that is kept: a replay without the job can begin at any of them


class Housekeeping:
    """Cleans up after each commit and at the end of a run. Worker 0 cleans up checkpoints for all workers.

    It also takes back the markers of checkpoints that may be wrong, before anything is computed again.

    Args:
        rank: this worker.
        run_id: this run.
        folder: where checkpoints are.
        log: this worker's log.
        local: copies of checkpoints on this machine's disk; None for none.
        keep_logs: which part of it stays.
        audited: spares audit. The logs of the last interval between two checkpoints stay for them.
        end_if_taken_over: raises if the store is another run's by now. Asked on worker 0.
        background: runs what waits for the store, one thing after the other.
    """

    def __init__(
        self,
        rank: int,
        run_id: str,
        folder: CheckpointFolder,
        log: WorkerLog,
        local: LocalParts | None = None,
        *,
        keep_logs: KeepLogs = KeepLogs.NEWEST,
        audited: bool = False,
        end_if_taken_over: Callable[[], None] = lambda: None,
        background: ThreadPoolExecutor,
    ) -> None:
        self._keep_logs = keep_logs
        self._audited = audited
        self._rank = rank
        self._folder = folder
        self._log = log
        self._local = local
        self._run_id = run_id
        self._end_if_taken_over = end_if_taken_over
        self._background = background
        self._lock = threading.Lock()
        self._withdrawn: tuple[tuple[Doubt, ...], Future[None]] | None = None  # guarded by the lock
        self._cleaned: tuple[int, int] | None = None  # epoch and commit; owner: the journal thread
        self._state: State | None = None  # the newest; written by the journal thread

    def on_change(self, state: State) -> None:
        """Clean up once a new commit is known and the job is live. Called in the journal thread."""
        self._state, checkpoints = state, state.checkpoints
        self._withdrawal(state)
        if state.phase != Phase.LIVE or checkpoints.committed is None:
            return
        if (now := (checkpoints.epoch, checkpoints.committed)) != self._cleaned:
            self._cleaned = now
            self._background.submit(self._clean, checkpoints.committed, state)

    def withdraw(self, state: State, timeout_s: float) -> None:
        """Wait until markers of checkpoints that may be wrong are gone. Logs a warning if they stay for long.

        A run that is resumed from this moment on would begin with the newest of them.
        """
        if (withdrawal := self._withdrawal(state)) is None:
            return
        what = "the store to delete markers of checkpoints that may be wrong"
        with waiting(what, timeout_s, flag="--checkpoint-timeout"):
            _, late = wait([withdrawal], timeout_s)
        if late:
            _logger.warning(
                "Markers of checkpoints that may be wrong are still in %s after %g s. It is tried on; until "
                "then do not --resume this run.",
                self._folder.store.url,
                timeout_s,
                extra={"event": "doubted_checkpoints_stay"},
            )

    def _withdrawal(self, state: State) -> Future[None] | None:
        """The task that takes back what is in doubt in a state; None if nothing is, or it is not ours."""
        if self._rank or not (doubts := state.checkpoints.doubts):
            return None
        with self._lock:
            if self._withdrawn is None or self._withdrawn[0] != doubts:
                self._withdrawn = doubts, self._background.submit(self._withdraw, doubts)
            return self._withdrawn[1]

    def _withdraw(self, doubts: Sequence[Doubt]) -> None:
        try:
            self._end_if_taken_over()
            for doubt in doubts:
                self._folder.withdraw(doubt.after, doubt.generation, self._run_id)
        except Exception as error:
            _logger.warning(
                "Checkpoints that may be wrong are still committed in %s (%s). It is tried again; until then "
                "do not --resume this run.",
                self._folder.store.url,
                first_line(error),
                extra={"event": "doubted_checkpoints_stay"},
            )
            with self._lock:
                self._withdrawn = None  # the next change begins another one

    def drain(self, timeout_s: float, *, others_train: bool = False) -> None:
        """At the end, wait for the clean-up. Logs a warning if that takes too long.

        Args:
            timeout_s: how long at most.
            others_train: this worker has left its loop, and others may not have: only what killed processes
                have left of checkpoints is deleted, which nobody writes any more.
        """
        if self._rank == 0:
            self._background.submit(self._tidy, others_train)
        what = "the store to delete old files"
        try:
            with waiting(what, timeout_s, flag="--checkpoint-timeout"):
                self._background.submit(lambda: None).result(timeout_s)
        except TimeoutError:
            _logger.warning(
                "Cleaning up after the last iteration took longer than %g s: "
                "old files are left in the store.",
                timeout_s,
                extra={"event": "cleanup_timed_out"},
            )

    def _clean(self, iteration: int, state: State) -> None:
        try:
            if self._rank == 0:
                self._end_if_taken_over()
            self._drop_logs(iteration, state)
            if self._local is not None:
                self._local.drop_before(iteration)
            if self._rank == 0:
                self._folder.clean(state.checkpoints.kept, state.generation, self._run_id)
        except Exception as error:
            _logger.warning(
                "Cleaning up after the checkpoint of iteration %d failed: %s",
                iteration,
                error,
                extra={"event": "cleanup_failed", "iteration": iteration},
            )

    def _drop_logs(self, iteration: int, state: State) -> None:
        since = state.checkpoints.kept[0] if self._keep_logs is KeepLogs.ALL else iteration
        if self._audited:
            self._log.drop_before(min(since, _audited_since(state)), state.generation)
            if not self._log.nearly_full():
                return
            # Training comes first: the audit finds that its logs are gone, and takes a newer interval.
        self._log.drop_before(since, state.generation)

    def _tidy(self, others_train: bool) -> None:
        state = self._state
        try:
            self._end_if_taken_over()
            if not others_train:
                tidy_store(self._folder.store)
            if state is None:
                return
            per_machine, started_in = state.shape.workers_per_machine, state.membership.started_in
            of_ranks = {rank: started_in[rank // per_machine] for rank in range(state.world_size)}
            if others_train:
                self._folder.delete_dead(of_ranks)
                return
            machines = {*state.membership.slots, *state.membership.spares}
            # Workers of a next world have ranks of their own, until it is given up with the run.
            workers = state.world_size if state.worlds.change is None else None
            if workers is not None:
                delete_left_logs(self._folder.store, workers, keep=self._keep_logs is KeepLogs.ALL)
            self._folder.tidy(of_ranks, workers)
            WorkerFiles(self._folder.store, self._run_id).sweep(of_ranks, machines, workers)
        except Exception as error:
            _logger.warning(
                "Cleaning up after the last iteration failed: %s", error, extra={"event": "cleanup_failed"}
            )


def _audited_since(state: State) -> int:
    """The iteration from which on spares may need the logs."""
    needed = logs_needed_since(state)
    return min([*state.checkpoints.kept[-2:], *([needed] if needed is not None else [])])
