"""Writes what the store says about this worker, in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial

from swift_ft.checkpoint.layer_costs import keep_layers
from swift_ft.checkpoint.own_gradients import OwnStep, write_own_steps
from swift_ft.checkpoint.recording_file import StoredRecording
from swift_ft.checkpoint.worker_files import PROFILE, SETUP, WorkerFiles, of_rank
from swift_ft.checkpoint.worker_history import WorkerHistory
from swift_ft.checkpoint.worker_record import WorkerRecord, write_record
from swift_ft.costs.job import Worker
from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.storage.store import Store

_logger = logging.getLogger(__name__)


class WorkerRecords:
    """Writes the record of one worker, what it measured, the history of its work, and its part in recoveries.

    Training needs none of it: what cannot be written is a warning.

    Args:
        run_id: the run.
        rank: the worker.
        background: runs what waits for the store.
    """

    def __init__(self, store: Store, run_id: str, rank: int, background: ThreadPoolExecutor) -> None:
        self._store = store
        self._run_id = run_id
        self._files = WorkerFiles(store, run_id)
        self._rank = rank
        self._background = background
        self._lock = threading.Lock()
        self._newest: WorkerHistory | None = None  # to be written; guarded by the lock
        self._warned: set[str] = set()  # owner: the background

    def write(self, record: WorkerRecord) -> None:
        """Write it soon. Returns at once."""
        then = "swift-recover replay will not work."
        self._soon(lambda: write_record(self._store, self._rank, record), "the record of its pipeline", then)

    def write_history(self, history: WorkerHistory) -> None:
        """Write the history of this process soon, unless there is a newer one by then. Returns at once."""
        with self._lock:
            pending, self._newest = self._newest is not None, history
        if pending:
            return
        try:
            self._soon(
                self._write_history, "what it has done so far", "It is tried again as the run goes on."
            )
        except RuntimeError as error:  # this process ends
            _logger.debug("%s", error, extra={"event": "worker_history_left", "rank": self._rank})

    def _write_history(self) -> None:
        with self._lock:
            history, self._newest = self._newest, None
        if history is not None:
            self._files.write(history.file, asdict(history))

    def write_recording(self, stored: StoredRecording) -> None:
        """Write soon what this process did in a recovery. Returns at once."""
        then = "The trace of that recovery is without it."
        self._soon(lambda: self._files.write(stored.file, asdict(stored)), "what it did in a recovery", then)

    def write_profile(self, measured: Worker) -> None:
        """Write soon what the worker has measured. Returns at once."""
        name, then = of_rank(self._rank, PROFILE), "swift-recover status and plan can say less."
        self._soon(lambda: self._files.write(name, asdict(measured)), "its profile", then)

    def write_layers(self, layers: Sequence[LayerProfile]) -> None:
        """Write the costs of the model's layers soon. Returns at once."""
        then = "A later run begins without it."
        self._soon(lambda: keep_layers(self._store, self._run_id, layers), "what layers cost", then)

    def write_setup(self, setup: Mapping[str, str]) -> None:
        """Write soon what a spare is given that computes this worker's steps again. Returns at once."""
        name, then = of_rank(self._rank, SETUP), "No spare audits its steps."
        self._soon(lambda: self._files.write(name, setup), "what its script communicated at first", then)

    def write_own_steps(self, steps: Mapping[int, OwnStep]) -> None:
        """Write soon what a spare can compute again. Returns at once."""
        write, then = partial(write_own_steps, self._files, self._rank, steps), "No spare audits it."
        self._soon(write, "what it has contributed to a step", then)

    def _soon(self, write: Callable[[], None], what: str, then: str) -> None:
        """Write in the background.

        Args:
            write: writes, or raises whatever the store's client raises.
            what: is missing if it fails, in words. They are said once.
            then: what follows from that.

        Raises:
            RuntimeError: this process ends.
        """
        self._background.submit(self._try, write, what, then)

    def _try(self, write: Callable[[], None], what: str, then: str) -> None:
        try:
            write()
        except Exception as error:  # training needs none of it
            if what in self._warned:
                return
            self._warned.add(what)
            _logger.warning(
                "Worker %d: %s cannot be written to %s now: %s. %s",
                self._rank,
                what,
                self._store.url,
                self._store.redacted(error),
                then,
                extra={"event": "worker_file_not_written", "rank": self._rank, "what": what},
            )
