"""Saves and loads one worker's part of the global checkpoint (paper §3).

Each worker does so without the others, so that a replacement can load alone. What it loads is what was saved,
or an error that says which file is not.
"""

from __future__ import annotations

import errno
import gc
import logging
import math
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.manifest import write_manifest
from swift_ft.checkpoint.part_files import LocalParts, PartFiles
from swift_ft.checkpoint.part_loading import PartLoader
from swift_ft.checkpoint.saved_form import bytes_of
from swift_ft.checkpoint.sliced_part import file_of_state
from swift_ft.checkpoint.state_digest import StateDigests
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import CheckpointError, DamagedCheckpointError, StoreNotWritableError, UsageError
from swift_ft.faults.failpoints import Point, hit
from swift_ft.observe.waits import waiting
from swift_ft.recovery.layout.stage_layers import StageLayers
from swift_ft.storage.retry import is_outage, is_transient, retry
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.writer import FileOf, staged, write_part

_logger = logging.getLogger(__name__)

_SAVE_S = 1800.0
# What torch raises when it reads something that is no checkpoint, or another one.
_DAMAGE = (pickle.UnpicklingError, EOFError, LookupError, AssertionError, AttributeError)


@dataclass(frozen=True, slots=True)
class _Save:
    iteration: int
    path: str
    copy: dict[str, Any]
    file_of: FileOf | None
    on_durable: Callable[[str], None]


class _StoreRefusedError(Exception):
    """The store did not accept a part, and may do so later."""


class Checkpointer:
    """Saves and loads one worker's part.

    Args:
        folder: where.
        state: what.
        local: copies of its files on this machine's disk; None for none.

    Attributes:
        files: where the files of parts are read.
        bytes_per_s: at which the last part was written; None before the first.
    """

    def __init__(
        self, folder: CheckpointFolder, state: TrainingState, local: LocalParts | None = None
    ) -> None:
        self.folder = folder
        self.files = PartFiles(local)
        self._state = state
        self._changed = threading.Condition()
        # ``_due`` is what the thread writes; the thread ends with it. While the thread is ``_waiting`` for a
        # store that failed, a newer save may replace it.
        self._due: _Save | None = None
        self._waiting = False
        self._failure = ""
        self.bytes_per_s: float | None = None

    def save(
        self,
        iteration: int,
        path: str,
        on_durable: Callable[[str], None],
        digests: StateDigests | None = None,
    ) -> None:
        """Copy the state now and write it in the background.

        If the store refuses the copy, the thread keeps it and tries again until the next save replaces it.
        The next save waits for one that is being written, but not for a store that is down. There is one copy
        at a time. A save that fails for good is logged as ``checkpoint_failed``; the last committed
        checkpoint and the logs since then stay.

        Args:
            iteration: completed iterations.
            path: the part's place in the store.
            on_durable: called in the background when the part is durable, with the digest that proves it.
            digests: of the state, for :meth:`load` to compare.

        Raises:
            CheckpointError: if the previous save does not end in time.
        """
        what = f"its earlier part of a checkpoint to be written to {self.folder.store.url}"
        with waiting(what, _SAVE_S), self._changed:
            if not self._changed.wait_for(lambda: self._due is None or self._waiting, _SAVE_S):
                raise CheckpointError(
                    f"The earlier checkpoint was not saved in {_SAVE_S:g} s: {self.folder.store.url} "
                    "is down, or too slow for checkpoint_every: check the store or save less often.",
                    iteration=iteration,
                )
            if (older := self._due) is not None:
                _log_failure(older, self._failure)
                _clear(older.copy)  # before the next copy is made
                self._due = None
            file_of = file_of_state(self._state)
            copy = staged(self._state.to_save(digests))
            self._due = _Save(iteration, path, copy, file_of, on_durable)
            if not self._waiting:
                threading.Thread(target=self._run, name="swift-checkpoint", daemon=True).start()

    def _run(self) -> None:
        retry(
            self._attempt,
            math.inf,
            lambda error: isinstance(error, _StoreRefusedError | StoreNotWritableError),
            what=f"{self.folder.store.url} to take its part of a checkpoint, while training goes on",
        )

    def _attempt(self) -> None:
        """Write what is due now. It may be newer than in the last attempt."""
        store = self.folder.store
        if self._waiting:
            store.probe(0.0)  # clients retry for a long time, in which a newer copy may replace this one
        with self._changed:
            due = self._due
            self._waiting = False
            if due is None:  # a newer save replaced it, and its state could not be copied
                return
        failure, retryable, digest = "", False, ""
        try:
            began = time.perf_counter()
            store.check_anchor()  # DCP makes folders, and must not make them in the place of a lost mount
            copies = self.files.local.written if self.files.local is not None else None
            files = write_part(store, due.path, due.copy, file_of=due.file_of, copies=copies)
            store.check_anchor()
            digest = write_manifest(store, due.path, files)
            self.bytes_per_s = bytes_of(due.copy) / (time.perf_counter() - began)
        except Exception as error:
            failure, retryable = (
                f"{type(error).__name__}: {store.redacted(error)}",
                _may_succeed_later(store, error),
            )
        else:
            failure = self._report(due, digest)
        if failure and not retryable:
            _log_failure(due, failure)
        if not retryable:
            _clear(due.copy)
        if failure:
            gc.collect()  # frames of failed attempts refer to each other, and to the copy's tensors
        with self._changed:
            self._failure, self._waiting = failure, retryable
            if not retryable:
                self._due = None
            self._changed.notify_all()
        if retryable:
            raise _StoreRefusedError(failure)

    def _report(self, done: _Save, digest: str) -> str:
        """Report that a part is durable. Returns why that failed; empty if it did not."""
        try:
            hit(Point.CHECKPOINT, done.iteration)
            done.on_durable(digest)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def load(
        self, iteration: int, rank: int, layout: StageLayers | None = None, workers: int | None = None
    ) -> None:
        """Load a worker's part of a committed checkpoint into the state, if it is the part that was saved.

        Args:
            rank: the worker.
            layout: for a LayerStack the number of layers of each stage. The checkpoint may have another one.
            workers: of the job. The checkpoint may be of another number, or of another sharding: then this
                worker's ranges are read from the parts that have them. None if it is of the same one.

        Raises:
            DamagedCheckpointError: it is not, or it is gone.
            CheckpointError: if it cannot be read.
            TopologyMismatchError: if another model made it.
        """
        try:
            self._read_twice(lambda: self._load(iteration, rank, layout, workers))
        except DamagedCheckpointError as error:
            raise self._damaged(iteration, rank, error) from error
        except (CheckpointError, UsageError):
            raise
        except Exception as error:
            store = self.folder.store
            if isinstance(error, OSError) and error.errno == errno.EIO:  # beyond the store's patience
                unreadable = DamagedCheckpointError(f"the disk cannot read it ({error})")
                raise self._damaged(iteration, rank, unreadable) from error
            raise CheckpointError(
                f"Worker {rank} cannot load the checkpoint of iteration {iteration} from "
                f"{store.url}: {store.redacted(error)}",
                iteration=iteration,
                rank=rank,
            ) from error

    def _may_pass(self, error: BaseException) -> bool:
        """Whether the store could not be read; a damaged part stays damaged."""
        return self.folder.store.may_pass(error) and not isinstance(error, (*_DAMAGE, CheckpointError))

    def _read_twice(self, action: Callable[[], None]) -> None:
        """A damage must be found twice: bits may flip on their way from the store, too."""
        patience_s = self.folder.store.patience_s
        try:
            retry(action, patience_s, self._may_pass)
        except DamagedCheckpointError:
            retry(action, patience_s, self._may_pass)

    def _damaged(self, iteration: int, rank: int, error: DamagedCheckpointError) -> DamagedCheckpointError:
        path = error.fields.get("path", "")
        return DamagedCheckpointError(
            f"the checkpoint of iteration {iteration} is damaged: {error} "
            f"(the part of worker {rank}, {self.folder.store.url}/{path})",
            **{**error.fields, "iteration": iteration, "rank": rank},
        )

    def _load(self, iteration: int, rank: int, layout: StageLayers | None, workers: int | None) -> None:
        self.folder.check_anchor()
        PartLoader(self.folder, self.files, self._state).load(iteration, rank, layout, workers)

    def wait(self, timeout_s: float) -> bool:
        """Wait until no save is under way; False if the timeout passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._due is None, timeout_s)


def _may_succeed_later(store: Store, error: BaseException) -> bool:
    """Whether the store did not answer, is full, or cannot be written at the moment.

    A store that goes away while a part is being written takes the folder along that was just made for it.
    """
    gone = isinstance(error, FileNotFoundError | NotADirectoryError)
    return gone or store.may_pass(error) or is_transient(error) or is_outage(error)


def _clear(state: dict[str, Any]) -> None:
    """Empty a copy. DCP leaves reference cycles behind that would keep its tensors alive."""
    for value in state.values():
        if isinstance(value, dict):
            _clear(value)
    state.clear()


def _log_failure(save: _Save, failure: str) -> None:
    _logger.warning(
        "The checkpoint of iteration %d could not be written to %s: %s. The previous checkpoint stays valid, "
        "and the next one is saved as usual.",
        save.iteration,
        save.path,
        failure,
        extra={"event": "checkpoint_failed", "iteration": save.iteration},
    )
