"""An agent's last duties for the session's store: when the run is over, its workers had no time for them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.store_claim import store_of_run
from swift_ft.checkpoint.worker_files import WorkerFiles
from swift_ft.coordination.archive import JournalArchive, end_of
from swift_ft.errors import first_line
from swift_ft.logging.writing.uploader import sweep_spools
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.job_state import State
from swift_ft.recovery.snapshot import JournalSnapshot
from swift_ft.storage.store import TEMPORARY_SUFFIX, Store

_logger = logging.getLogger(__name__)

_TAIL = 4096
"""Entries of the journal that are kept in memory: those that no worker may have archived."""

_ARCHIVING_SLOTS = 3
"""The lowest living machines that archive the end of the journal.

One would do; but its worker may have ended before its session began, so that it does not know the store. The
first to write spares the others the work.
"""


_PATIENCE = 0.5
"""With a store that is away, as a part of the limit: there must be time left to say so."""

_NOT_ARCHIVED = "The end of the run could not be archived in its store"
_NOT_TIDIED = "The end of the run could not be tidied in its store"
_STILL_COMMITTED = "Checkpoints that may be wrong are still in the store: do not --resume this run"


class RunEnd:
    """Removes begun files of this machine's workers, and archives the last entries of the journal.

    Args:
        run_id: the run.
        on_store: called in the agent's thread with the URL of the session's store, once it is known.
        on_passed: called there with each point for faults that a worker of this machine is the first to pass.
    """

    def __init__(
        self,
        run_id: str,
        on_store: Callable[[str], None] = lambda _: None,
        on_passed: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._run_id = run_id
        self._on_store = on_store
        self._on_passed = on_passed
        self._lock = threading.Lock()
        self._tail: deque[Entry] = deque(maxlen=_TAIL)  # guarded by the lock
        # Owner of these four: the agent's thread, until the run is over.
        self._logs: set[Path] = set()  # where workers of this machine wrote their logs
        self._spools: set[Path] = set()  # where they kept them until they were uploaded
        self._passed: set[str] = set()
        self._store = ""  # its URL, once a worker of this machine has claimed it

    def on_entries(self, entries: Sequence[Entry]) -> None:
        """Keep entries. Called in the follower's thread."""
        with self._lock:
            self._tail += entries

    def on_snapshot(self, _: JournalSnapshot) -> None:
        """Entries are missing from here on: they are archived. Called in the follower's thread."""
        with self._lock:
            self._tail.clear()

    def hear(self, message: dict[str, Any]) -> None:
        """Note what a worker says about its store and its log, and pass on where faults may strike."""
        if "log" in message:
            self._logs.add(Path(message["log"]))
        if "spools" in message:
            self._spools.add(Path(message["spools"]))
        if "store" in message:
            self._store = message["store"]
            self._on_store(self._store)
        if (point := message.get("passed")) is not None and point not in self._passed:
            self._passed.add(point)
            self._on_passed(point)

    def tidy(self, state: State, slot: int | None, limit_s: float) -> None:
        """The job has ended, and so have the workers.

        Args:
            slot: this machine's; None if it has left its slot in the end.
            limit_s: a lost mount may hang for ever.
        """
        archives = slot is None or slot in sorted(state.membership.members)[:_ARCHIVING_SLOTS]

        ranks = state.ranks_of(slot) if slot is not None else range(0)
        succeeded = state.verdict is not None and state.verdict.ok

        def tidy() -> None:
            self._sweep_logs()
            if archives:  # first: only this tells how the run ended
                self._archive(limit_s)
            if archives and state.checkpoints.doubts:
                self._in_store(lambda store: self._withdraw(store, state), limit_s, _STILL_COMMITTED)
            if not succeeded and ranks:
                self._in_store(lambda store: self._sweep_drafts(store, state, ranks), limit_s, _NOT_TIDIED)

        _within(limit_s, tidy)

    def archive(self, limit_s: float) -> None:
        """The journal is lost, and with it the job: archive what this machine has read of it."""
        _within(limit_s, lambda: self._archive(limit_s))

    def sweep_spools(self, limit_s: float) -> None:
        """Remove what killed workers have left of their logs on the local disk.

        Otherwise the next worker that keeps its log there does, of any run, and there may be none.

        Args:
            limit_s: a disk may hang for ever.
        """

        def sweep() -> None:
            for place in self._spools:
                sweep_spools(place)

        if self._spools:
            _within(limit_s, sweep, "removed from the local disk")

    def _sweep_logs(self) -> None:
        for folder in self._logs:
            for leftover in folder.glob(f"*{TEMPORARY_SUFFIX}"):
                with contextlib.suppress(OSError):
                    leftover.unlink()

    def _withdraw(self, store: Store, state: State) -> None:
        """Worker 0 does so while it lives: its script may have ended before it read of it."""
        for doubt in state.checkpoints.doubts:
            CheckpointFolder(store).withdraw(doubt.after, doubt.generation, self._run_id)

    def _sweep_drafts(self, store: Store, state: State, ranks: range) -> None:
        """Workers of other machines may be writing theirs."""
        CheckpointFolder(store).sweep_drafts(ranks)
        ended = dict.fromkeys(ranks, state.generation + 1)
        WorkerFiles(store, self._run_id).sweep(ended, state.membership.slots, state.world_size)

    def _archive(self, limit_s: float) -> None:
        self._in_store(self._write_tail, limit_s, _NOT_ARCHIVED)

    def _write_tail(self, store: Store) -> None:
        archive = JournalArchive(store, self._run_id)
        end = end_of(archive.spans())
        with self._lock:
            new = [entry for entry in self._tail if entry.position >= end]
        if new:
            archive.write(new)

    def _in_store(self, act: Callable[[Store], None], limit_s: float, otherwise: str) -> None:
        """Do something in the run's store, which may be gone, or of another run by now.

        Args:
            act: what.
            limit_s: for all that is done at the end.
            otherwise: what to say if it cannot be done.
        """
        if not self._store:
            return
        try:
            store = store_of_run(self._store, self._run_id, limit_s * _PATIENCE)
            if store is not None:
                act(store)
        except Exception as error:
            _logger.warning(
                "%s: %s",
                otherwise,
                first_line(error),
                extra={"event": "archive_failed"},
            )


def _within(limit_s: float, action: Callable[[], None], done: str = "archived in its store") -> None:
    thread = threading.Thread(target=action, name="swift-run-end", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        _logger.warning(
            "The end of the run could not be %s within %g s (--shutdown-timeout).",
            done,
            limit_s,
            extra={"event": "archive_failed"},
        )
