"""The global checkpoint: DCP checkpoints of all workers, and a marker that is written last (paper §3).

    checkpoints/00000020/rank-00001.g00002/   one worker's part, a DCP checkpoint of its own
    checkpoints/00000020/committed.json       names all parts; without it the checkpoint does not exist

Each worker saves and loads its own part without talking to anybody, so a replacement needs nobody to load.
"""

from __future__ import annotations

import copy
import io
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
)
from torch.optim import Optimizer

from swift_ft.determinism import host_random_state, set_host_random_state
from swift_ft.errors import CheckpointError
from swift_ft.logging import Store

__all__ = ["CheckpointFolder", "Checkpointer", "TrainingState"]

# That DCP works without a group is meant; it warns in threads, where no context manager reaches.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_SAVE_S = 1800.0
_ROOT = "checkpoints"
_MARKER = "committed.json"


class TrainingState:
    """What a session protects: modules, optimizers, and small objects with a ``state_dict``.

    Args:
        parts: by name. A module or an optimizer is large state; everything else must have ``state_dict()``
            and ``load_state_dict()`` and is copied at every step.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
        self.optimizers = {name: part for name, part in parts.items() if isinstance(part, Optimizer)}
        large = self.modules.keys() | self.optimizers.keys()
        self.small = {name: part for name, part in parts.items() if name not in large}

    def snapshot(self) -> dict[str, Any]:
        """A copy of all small state and of the host's random state, for putting it back (kilobytes)."""
        parts = {name: copy.deepcopy(part.state_dict()) for name, part in self.small.items()}
        return {"parts": parts, "random": host_random_state()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Put back what :meth:`snapshot` copied."""
        for name, part in self.small.items():
            part.load_state_dict(copy.deepcopy(saved["parts"][name]))
        set_host_random_state(saved["random"])

    def to_save(self) -> dict[str, Any]:
        """Everything, by name, as DCP stores it; large tensors are the live ones.

        Optimizers are kept as they are (no helper of DCP's is asked: it would run a step on one whose state
        is still empty, and so count a step that never was).
        """
        optimizers, plain = {}, {}
        for name, optimizer in self.optimizers.items():
            saved = optimizer.state_dict()
            tensors, rest = _split_tensors(saved["state"])
            optimizers[name] = {"state": tensors}
            plain[name] = {"state": rest, "param_groups": saved["param_groups"]}
        return {
            "models": {name: get_model_state_dict(module) for name, module in self.modules.items()},
            "optimizers": optimizers,
            "plain": {"bytes": _to_bytes({"small": self.snapshot(), "optimizers": plain})},
        }

    def to_load(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors for all that a checkpoint holds, to be filled: the model's own, fresh ones for optimizers.

        Args:
            stored: DCP's metadata by flat name.
        """
        optimizers: dict[str, Any] = {}
        for name in self.optimizers:
            prefix = f"optimizers.{name}.state."
            state: dict[str, dict[str, torch.Tensor]] = {}
            for flat, meta in stored.items():
                if flat.startswith(prefix):
                    parameter, _, field = flat.removeprefix(prefix).partition(".")
                    tensor = torch.empty(meta.size, dtype=meta.properties.dtype)
                    state.setdefault(parameter, {})[field] = tensor
            optimizers[name] = {"state": state}
        return {
            "models": {name: get_model_state_dict(module) for name, module in self.modules.items()},
            "optimizers": optimizers,
            "plain": {"bytes": io.BytesIO()},
        }

    def take_over(self, loaded: dict[str, Any]) -> None:
        """Make what :meth:`to_load` was filled with the state."""
        loaded["plain"]["bytes"].seek(0)
        plain = torch.load(loaded["plain"]["bytes"], weights_only=True)
        for name, module in self.modules.items():
            set_model_state_dict(module, loaded["models"][name])
        for name, optimizer in self.optimizers.items():
            state: dict[int, dict[str, Any]] = {
                int(i): dict(v) for i, v in plain["optimizers"][name]["state"].items()
            }
            for parameter, fields in loaded["optimizers"][name]["state"].items():
                state.setdefault(int(parameter), {}).update(fields)
            groups = plain["optimizers"][name]["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.restore(plain["small"])


def _split_tensors(
    state: Mapping[int, Mapping[str, Any]],
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, dict[str, Any]]]:
    """An optimizer's state by parameter: tensors apart from plain values."""
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    rest: dict[str, dict[str, Any]] = {}
    for parameter, fields in state.items():
        rest[str(parameter)] = {k: v for k, v in fields.items() if not isinstance(v, torch.Tensor)}
        if found := {k: v for k, v in fields.items() if isinstance(v, torch.Tensor)}:
            tensors[str(parameter)] = found
    return tensors, rest


def _to_bytes(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer


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
        self._folder = folder
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
                f"{self._folder.store.url} does not answer, or checkpoint_every is too small for it.",
                iteration=iteration,
            )
        self._idle.clear()
        writer = FsspecWriter(self._folder.store.child_url(path))
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
        path = self._folder.part_of(iteration, rank)
        try:
            reader = FsspecReader(self._folder.store.child_url(path))
            state = self._state.to_load(reader.read_metadata().state_dict_metadata)
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
