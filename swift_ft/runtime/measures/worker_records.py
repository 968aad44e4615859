"""Writes what the store says about this worker, in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from swift_ft.checkpoint.layer_costs import keep_layers
from swift_ft.checkpoint.recording_file import StoredRecording, write_recording
from swift_ft.checkpoint.worker_history import WorkerHistory, write_history
from swift_ft.checkpoint.worker_profile import write_profile
from swift_ft.checkpoint.worker_record import WorkerRecord, write_record
from swift_ft.costs.job import Worker
from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.storage.store import Store

_logger = logging.getLogger(__name__)


class WorkerRecords:
    """Writes the record of one worker, what it measured, the history of its work, and its part in recoveries.

    Args:
        run_id: the run.
        rank: the worker.
        background: runs what waits for the store.
    """

    def __init__(self, store: Store, run_id: str, rank: int, background: ThreadPoolExecutor) -> None:
        self._store = store
        self._run_id = run_id
        self._rank = rank
        self._background = background
        self._lock = threading.Lock()
        self._newest: WorkerHistory | None = None  # to be written; guarded by the lock
        self._warned = False  # owner: the background

    def write(self, record: WorkerRecord) -> None:
        """Write it soon. Returns at once."""
        self._background.submit(self._write, record)

    def _write(self, record: WorkerRecord) -> None:
        try:
            write_record(self._store, self._rank, record)
        except Exception as error:  # training needs none of it
            _logger.warning(
                "The record of worker %d could not be written to %s: %s. swift-recover replay will not work.",
                self._rank,
                self._store.url,
                self._store.redacted(error),
                extra={"event": "worker_record_not_written", "rank": self._rank},
            )

    def write_history(self, history: WorkerHistory) -> None:
        """Write the history of this process soon, unless there is a newer one by then. Returns at once."""
        with self._lock:
            pending, self._newest = self._newest is not None, history
        if pending:
            return
        try:
            self._background.submit(self._write_history)
        except RuntimeError as error:  # this process ends
            _logger.debug("%s", error, extra={"event": "worker_history_left", "rank": self._rank})

    def _write_history(self) -> None:
        with self._lock:
            history, self._newest = self._newest, None
        if history is None:
            return
        try:
            write_history(self._store, history)
        except Exception as error:  # training needs none of it, and a later one holds all of it
            if not self._warned:
                self._warned = True
                _logger.warning(
                    "What worker %d has done so far cannot be noted in %s now (%s): it is tried again as the "
                    "run goes on.",
                    self._rank,
                    self._store.url,
                    self._store.redacted(error),
                    extra={"event": "worker_history_not_written", "rank": self._rank},
                )

    def write_recording(self, stored: StoredRecording) -> None:
        """Write soon what this process did in a recovery. Returns at once."""
        self._background.submit(self._write_recording, stored)

    def _write_recording(self, stored: StoredRecording) -> None:
        try:
            write_recording(self._store, stored)
        except Exception as error:  # training needs none of it
            _logger.warning(
                "What worker %d did in a recovery could not be written to %s: %s. The trace of that recovery "
                "is without it.",
                self._rank,
                self._store.url,
                self._store.redacted(error),
                extra={"event": "recording_not_written", "rank": self._rank},
            )

    def write_profile(self, measured: Worker) -> None:
        """Write soon what the worker has measured. Returns at once."""
        self._background.submit(self._write_profile, measured)

    def _write_profile(self, measured: Worker) -> None:
        try:
            write_profile(self._store, self._run_id, self._rank, measured)
        except Exception as error:  # training needs none of it
            _logger.warning(
                "The profile of worker %d could not be archived in %s: %s. swift-recover status and plan can "
                "say less.",
                self._rank,
                self._store.url,
                self._store.redacted(error),
                extra={"event": "profile_not_archived", "rank": self._rank},
            )

    def write_layers(self, layers: Sequence[LayerProfile]) -> None:
        """Write the costs of the model's layers soon. Returns at once."""
        self._background.submit(self._write_layers, layers)

    def _write_layers(self, layers: Sequence[LayerProfile]) -> None:
        try:
            keep_layers(self._store, self._run_id, layers)
        except Exception as error:  # training needs none of it
            _logger.warning(
                "The costs of layers could not be kept in %s: %s. A later run begins without them.",
                self._store.url,
                self._store.redacted(error),
                extra={"event": "layer_costs_not_kept"},
            )
