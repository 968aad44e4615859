"""The global checkpoint: DCP checkpoints of all workers, and a marker that is written last (paper §3).

    checkpoints/00000020/rank-00001.g00002/   one worker's part, a DCP checkpoint of its own
    checkpoints/00000020/committed.json       names all parts; without it the checkpoint does not exist

Each worker saves and loads its own part without talking to anybody, so a replacement needs nobody to load.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from swift_ft.errors import CheckpointError
from swift_ft.logging import Store
from swift_ft.recovery.state import TensorKind, TrainingState

__all__ = ["CheckpointFolder", "Checkpointer"]

# That DCP works without a group is meant; it warns in threads, where no context manager reaches.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_SAVE_S = 1800.0
_ROOT = "checkpoints"
_MARKER = "committed.json"


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
        """Write the marker, last of all."""
        marker = {"iteration": iteration, "run_id": run_id, "parts": {str(r): p for r, p in parts.items()}}
        self.store.write_json(f"{_ROOT}/{iteration:08d}/{_MARKER}", marker)

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
            self._drop_orphans(iteration)

    def _drop_orphans(self, iteration: int) -> None:
        folder = f"{_ROOT}/{iteration:08d}"
        marker = self.store.read_json(f"{folder}/{_MARKER}") or {"parts": {}}
        kept = {path.rsplit("/", 1)[-1] for path in marker["parts"].values()} | {_MARKER}
        for name in self.store.list(folder):
            if name not in kept:
                self.store.delete(f"{folder}/{name}", recursive=True)

    def _all(self) -> list[str]:
        return [name for name in self.store.list(_ROOT) if name.isdigit()]


class Checkpointer:
    """Saves and loads one worker's part.

    Args:
        folder: where.
        state: what.
        on_written: told in a background thread when a part is in the store, before anybody else knows.
    """

    def __init__(
        self, folder: CheckpointFolder, state: TrainingState, on_written: Callable[[int], None]
    ) -> None:
        self.folder = folder
        self._state = state
        self._on_written = on_written
        self._saving: Future[Any] | None = None
        self._idle = threading.Event()
        self._idle.set()

    def save(self, iteration: int, path: str, on_durable: Callable[[], None]) -> None:
        """Copy the state now and write it in the background; waits for a save that is still going on.

        A failed save is reported as a warning: the last committed checkpoint and the logs since then stay,
        and the next save tries again.

        Args:
            iteration: completed iterations.
            path: the part's place in the store.
            on_durable: called in the background when it is there.

        Raises:
            CheckpointError: if the save before it does not come to an end.
        """
        if not self._idle.wait(_SAVE_S):
            raise CheckpointError(
                f"The save of an earlier checkpoint has not ended within {_SAVE_S:g} s: "
                f"{self.folder.store.url} does not answer, or checkpoint_every is too small for it.",
                iteration=iteration,
            )
        self._idle.clear()
        writer = FsspecWriter(self.folder.store.child_url(path))
        future = state_dict_saver.async_save(self._state.to_save(), storage_writer=writer, no_dist=True)
        assert isinstance(future, Future)

        def finished(done: Future[Any]) -> None:
            try:
                done.result()
                self._on_written(iteration)
                on_durable()
            except Exception as error:
                warnings.warn(
                    f"The checkpoint of iteration {iteration} could not be written to {path}: {error}. "
                    "The one before it stays valid, and the next one is tried at its time.",
                    stacklevel=2,
                )
            finally:
                self._idle.set()

        future.add_done_callback(finished)

    def load(self, iteration: int, rank: int) -> None:
        """Load a worker's part of a committed checkpoint into the state at hand.

        Raises:
            CheckpointError: if it cannot be read.
        """
        path = self.folder.part_of(iteration, rank)
        try:
            reader = FsspecReader(self.folder.store.child_url(path))
            stored = reader.read_metadata()
            paths = stored.planner_data or {}
            kinds = {
                paths.get(flat, tuple(flat.split("."))): TensorKind(meta.properties.dtype, tuple(meta.size))
                for flat, meta in stored.state_dict_metadata.items()
                if isinstance(meta, TensorStorageMetadata)
            }
            state = self._state.to_load(kinds)
            state_dict_loader.load(state, storage_reader=reader, no_dist=True)
            self._state.take_over(state)
        except Exception as error:
            raise CheckpointError(
                f"Worker {rank} cannot load the checkpoint of iteration {iteration} from {path}: {error}",
                iteration=iteration,
                rank=rank,
                path=path,
            ) from error

    def wait(self, timeout_s: float) -> bool:
        """Wait for a save that is going on; False when the deadline passed first."""
        return self._idle.wait(timeout_s)
