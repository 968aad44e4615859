"""The global checkpoint: DCP checkpoints of all workers, and a marker that is written last (paper §3).

    checkpoints/00000020/rank-00001.g00002/   one worker's part, a DCP checkpoint of its own
    checkpoints/00000020/committed.json       names all parts; without it the checkpoint does not exist

Each worker saves and loads its own part without talking to anybody, so a replacement needs nobody to load.
"""

from __future__ import annotations

import gc
import math
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from swift_ft.errors import CheckpointError, StoreNotWritableError
from swift_ft.logging import Store
from swift_ft.logging.retry import is_transient, lacks_room, patiently
from swift_ft.recovery.part import PartReader, staged, write_part
from swift_ft.recovery.state import TensorKind, TrainingState, bytes_of

__all__ = ["CheckpointFolder", "Checkpointer"]

_SAVE_S = 1800.0
_ROOT = "checkpoints"
_MARKER = "committed.json"
# How torch says that what it reads is no checkpoint, or another one.
_DAMAGE = (pickle.UnpicklingError, EOFError, LookupError, AssertionError, AttributeError)


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The checkpoints in a store."""

    store: Store

    def part(self, iteration: int, rank: int, generation: int) -> str:
        """Where a worker writes its part; the generation keeps a fenced writer away from its successor's."""
        return f"{_ROOT}/{iteration:08d}/rank-{rank:05d}.g{generation:05d}"

    def committed(self) -> list[int]:
        """Iterations of all committed checkpoints, oldest first."""
        return sorted(int(name) for name in self._all() if self.store.exists(f"{_ROOT}/{name}/{_MARKER}"))

    def commit(self, iteration: int, parts: Mapping[int, str], run_id: str) -> None:
        """Write the marker, last of all, unless the very same is there.

        A commit is repeated when it is not known whether an earlier one got through. It often did; and a
        second marker that is not written leaves nothing behind when its writer ends in the midst of it.
        """
        marker = {"iteration": iteration, "run_id": run_id, "parts": {str(r): p for r, p in parts.items()}}
        path = f"{_ROOT}/{iteration:08d}/{_MARKER}"
        if self.store.read_json(path) != marker:
            self.store.write_json(path, marker)

    def part_of(self, iteration: int, rank: int) -> str:
        """Where a worker's part of a committed checkpoint is.

        Raises:
            CheckpointError: if it is not there.
        """
        marker = self.store.read_json(f"{_ROOT}/{iteration:08d}/{_MARKER}")
        if marker is None or str(rank) not in marker["parts"]:
            raise CheckpointError(
                f"The checkpoint of iteration {iteration} in {self.store.url} has no part of worker {rank}.",
                iteration=iteration,
                rank=rank,
            )
        return str(marker["parts"][str(rank)])

    def clean(self, keep: int, known: int) -> None:
        """Delete all but the newest committed checkpoints, and what is no part of one.

        Only markers up to ``known``, the commit that everybody knows of, count: a newer one may have been
        written by somebody who died before telling.
        """
        kept = {i for i in self.committed() if i <= known}
        kept = set(sorted(kept)[-keep:])
        for name in self._all():
            if int(name) < known and int(name) not in kept:
                self.store.delete(f"{_ROOT}/{name}", recursive=True)
        for iteration in kept:
            self._drop_orphans(iteration, known)

    def _drop_orphans(self, iteration: int, known: int) -> None:
        folder = f"{_ROOT}/{iteration:08d}"
        marker = self.store.read_json(f"{folder}/{_MARKER}")
        if marker is None:  # whatever became of it, the parts may be all that there is
            return
        kept = {path.rsplit("/", 1)[-1] for path in marker["parts"].values()} | {_MARKER}
        for name in self.store.list(folder):
            # The newest commit may just be repeated by another worker; the next clean-up knows a newer one.
            being_written = name.startswith(f"{_MARKER}.") and iteration == known
            if name not in kept and not being_written:
                self.store.delete(f"{folder}/{name}", recursive=True)
        self.store.abort_uploads(folder)  # of attempts that failed

    def _all(self) -> list[str]:
        return [name for name in self.store.list(_ROOT) if name.isdigit()]


@dataclass(frozen=True, slots=True)
class _Save:
    iteration: int
    path: str
    copy: dict[str, Any]
    on_durable: Callable[[], None]


class _NotTakenError(Exception):
    """The store did not take a part, and may later."""


class Checkpointer:
    """Saves and loads one worker's part.

    Args:
        folder: where.
        state: what.
        on_written: told in a background thread when a part is in the store, before anybody else knows.

    Attributes:
        bytes_per_s: at which the last part was written; None before the first.
    """

    def __init__(
        self, folder: CheckpointFolder, state: TrainingState, on_written: Callable[[int], None]
    ) -> None:
        self.folder = folder
        self._state = state
        self._on_written = on_written
        self._changed = threading.Condition()
        # What is to be written. It is the thread's, which ends with it; but while the thread is ``_waiting``
        # for a store that failed, a newer one may take its place.
        self._due: _Save | None = None
        self._waiting = False
        self._failure = ""
        self.bytes_per_s: float | None = None

    def save(self, iteration: int, path: str, on_durable: Callable[[], None]) -> None:
        """Copy the state now and write it in the background.

        While the store does not take it, the copy is kept and written again, until the next save takes its
        place. That waits for a save that is being written, but not for a store that is down: there is one
        copy at a time. A save that failed for good is reported as a warning: the last committed checkpoint
        and the logs since then stay.

        Args:
            iteration: completed iterations.
            path: the part's place in the store.
            on_durable: called in the background when it is there.

        Raises:
            CheckpointError: if the save before it does not come to an end.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._due is None or self._waiting, _SAVE_S):
                raise CheckpointError(
                    f"The save of an earlier checkpoint has not ended within {_SAVE_S:g} s: "
                    f"{self.folder.store.url} does not answer, or checkpoint_every is too small for it.",
                    iteration=iteration,
                )
            if (waiting := self._due) is not None:
                _warn(waiting, self._failure)
                _let_go(waiting.copy)  # before the next one is made
                self._due = None
            self._due = _Save(iteration, path, staged(self._state.to_save()), on_durable)
            if not self._waiting:
                threading.Thread(target=self._run, name="swift-checkpoint", daemon=True).start()

    def _run(self) -> None:
        patiently(
            self._attempt, math.inf, lambda error: isinstance(error, _NotTakenError | StoreNotWritableError)
        )

    def _attempt(self) -> None:
        """Write what is due now, which may be newer than at the last attempt."""
        store = self.folder.store
        if self._waiting:
            store.probe(0.0)  # until the store answers, which clients try for long, the copy may be replaced
        with self._changed:
            due = self._due
            self._waiting = False
            if due is None:  # a newer one was to take its place, and could not be copied
                return
        failure, may_pass = "", False
        try:
            began = time.perf_counter()
            write_part(store, due.path, due.copy)
            self.bytes_per_s = bytes_of(due.copy) / (time.perf_counter() - began)
        except Exception as error:
            failure, may_pass = f"{type(error).__name__}: {store.shown(error)}", _may_be_put_right(error)
        else:
            failure = self._tell(due)
        if failure and not may_pass:
            _warn(due, failure)
        if not may_pass:
            _let_go(due.copy)
        if failure:
            gc.collect()  # frames of failed attempts refer to each other, and to the copy's tensors
        with self._changed:
            self._failure, self._waiting = failure, may_pass
            if not may_pass:
                self._due = None
            self._changed.notify_all()
        if may_pass:
            raise _NotTakenError(failure)

    def _tell(self, done: _Save) -> str:
        """Tell that a part is there; returns why that failed, if it did."""
        try:
            self._on_written(done.iteration)
            done.on_durable()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def load(self, iteration: int, rank: int) -> None:
        """Load a worker's part of a committed checkpoint into the state at hand.

        Raises:
            CheckpointError: if it cannot be read.
        """
        store = self.folder.store
        path = ""
        try:
            path = self.folder.part_of(iteration, rank)
            patiently(lambda: self._load(path), store.patience_s, _may_pass)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"Worker {rank} cannot load the checkpoint of iteration {iteration} from "
                f"{path or self.folder.store.url}: {store.shown(error)}",
                iteration=iteration,
                rank=rank,
                path=path,
            ) from error

    def _load(self, path: str) -> None:
        reader = PartReader(self.folder.store, path)
        stored = reader.read_metadata()
        paths = stored.planner_data or {}
        kinds = {
            paths.get(flat, tuple(flat.split("."))): TensorKind(meta.properties.dtype, tuple(meta.size))
            for flat, meta in stored.state_dict_metadata.items()
            if isinstance(meta, TensorStorageMetadata)
        }
        state = self._state.to_load(kinds)
        reader.fill(state)
        self._state.take_over(state)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a save that is going on; False when the deadline passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._due is None, timeout_s)


def _may_be_put_right(error: BaseException) -> bool:
    """A store that does not answer, is full, or must not be written for now."""
    return is_transient(error) or lacks_room(error) or isinstance(error, PermissionError)


def _let_go(state: dict[str, Any]) -> None:
    """Empty a copy: DCP leaves circles of objects behind that refer to it."""
    for value in state.values():
        if isinstance(value, dict):
            _let_go(value)
    state.clear()


def _warn(save: _Save, failure: str) -> None:
    warnings.warn(
        f"The checkpoint of iteration {save.iteration} could not be written to {save.path}: {failure}. "
        "The one before it stays valid, the next one is tried at its time.",
        stacklevel=3,
    )


def _may_pass(error: BaseException) -> bool:
    """A store that does not answer, and not a part that is damaged."""
    return is_transient(error) and not isinstance(error, _DAMAGE)
