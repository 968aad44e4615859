"""Writes into the session's store what an agent did in a recovery: it detected a loss, or started workers.

The agent learns the store from its workers. It writes in a thread of its own, and an agent that had nothing
to do writes nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict

from swift_ft.checkpoint.recording_file import StoredRecording, clock_of_host
from swift_ft.checkpoint.store_claim import store_of_run
from swift_ft.checkpoint.worker_files import WorkerFiles
from swift_ft.errors import first_line
from swift_ft.observe.spans import Recording
from swift_ft.observe.waits import waiting

_logger = logging.getLogger(__name__)

_KEPT = 64
"""Recordings that wait until a worker says where the store is."""

_PATIENCE_S = 10.0


class AgentRecordings:
    """Takes the recordings of one agent. All threads may use it.

    Args:
        run_id: the run.
        by: the agent, in words.
        place: its machine, and the slot of that.
    """

    def __init__(self, run_id: str, by: str, place: Callable[[], tuple[str, int | None]]) -> None:
        self._run_id = run_id
        self._by = by
        self._place = place
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._url = ""
        self._waiting: deque[StoredRecording] = deque(maxlen=_KEPT)
        self._thread: threading.Thread | None = None

    def take(self, recording: Recording, generation: int) -> None:
        """Write a recording soon. Returns at once."""
        if not recording.spans:
            return
        machine, slot = self._place()
        stored = StoredRecording(
            self._run_id, generation, self._by, None, machine, slot, clock_of_host(), recording
        )
        with self._lock:
            self._waiting.append(stored)
            self._start()

    def found(self, url: str) -> None:
        """A worker says which store the session has."""
        with self._lock:
            self._url = url
            self._start()

    def drain(self, limit_s: float) -> None:
        """Wait until all is written, but no longer than that."""
        if (thread := self._thread) is not None:
            with waiting("the store to take what this machine's agent did in a recovery", limit_s):
                thread.join(limit_s)

    def _start(self) -> None:
        if self._url and self._waiting and self._thread is None:
            self._thread = threading.Thread(target=self._write, name="swift-recordings", daemon=True)
            self._thread.start()

    def _write(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                url, stored = self._url, self._waiting.popleft()
            try:
                if (store := store_of_run(url, self._run_id, _PATIENCE_S)) is not None:
                    WorkerFiles(store, self._run_id).write(stored.file, asdict(stored))
            except Exception as error:  # no recovery needs it
                _logger.warning(
                    "What this machine's agent did in a recovery could not be written: %s. The trace of that "
                    "recovery is without it.",
                    first_line(error),
                    extra={"event": "recording_not_written"},
                )
