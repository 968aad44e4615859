"""The checkpoints in a store: DCP checkpoints of all workers, and a marker that is written last (paper §3).

checkpoints/00000020/rank-00001.g00002/   one worker's part, a DCP checkpoint of its own
checkpoints/00000020/committed.json       names all parts; without it the checkpoint does not exist
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from swift_ft.checkpoint.manifest import read_manifest, read_marker
from swift_ft.checkpoint.state_payload import FetchRanges
from swift_ft.errors import CheckpointError, DamagedCheckpointError, SwiftError
from swift_ft.recovery.job_state import SavedPart
from swift_ft.storage.digest import sealed
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.reader import PartReader
from swift_ft.torch_adapters.dcp.verified_files import NearFiles

_ROOT = "checkpoints"
MARKER = "committed.json"
"""The file that names all parts, and so commits them."""
_PART = re.compile(r"rank-(?P<rank>\d{5})\.g(?P<generation>\d{5})")


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The checkpoints in a store."""

    store: Store

    def part(self, iteration: int, rank: int, generation: int) -> str:
        """The file of a worker's part. A fenced worker and its successor differ in the generation."""
        return f"{_folder(iteration)}/rank-{rank:05d}.g{generation:05d}"

    def committed(self) -> list[int]:
        """Iterations of all committed checkpoints, oldest first."""
        # The marker is written last: without one there is no checkpoint (decision 81).
        return sorted(int(name) for name in self._all() if self.store.exists(f"{_ROOT}/{name}/{MARKER}"))

    def commit(
        self,
        iteration: int,
        parts: Mapping[int, str],
        run_id: str,
        digests: Mapping[str, str],
        layers: Mapping[int, Sequence[int]] = MappingProxyType({}),
        layout: Sequence[int] = (),
    ) -> None:
        """Write the marker, last of all, unless the same marker is there.

        A commit is repeated when the outcome of an earlier one is unknown. Often that one succeeded. Then
        nothing is written, so that a writer that dies leaves no temporary file behind.

        Args:
            parts: the place of each worker's part, by rank. Replicas share one.
            run_id: the run that saved it.
            digests: by place, the digest of the list of a part's files.
            layers: by rank, the layers of a LayerStack in the worker's part.
            layout: the number of its layers on each stage.
        """
        content = {
            "iteration": iteration,
            "run_id": run_id,
            "parts": {str(rank): path for rank, path in parts.items()},
            "digests": dict(digests),
        }
        if layers:
            content["layers"] = {str(rank): list(own) for rank, own in layers.items()}
            content["layout"] = list(layout)
        marker = sealed(content)
        path = f"{_folder(iteration)}/{MARKER}"
        # A marker that is damaged, or another one, is written again.
        with suppress(SwiftError):
            if self.store.read_json(path) == marker:
                return
        self.store.write_json(path, marker)

    def parts_of(self, iteration: int) -> dict[int, SavedPart]:
        """All parts of a committed checkpoint, by rank.

        Raises:
            DamagedCheckpointError: if the marker is gone, or is not what was written.
            CheckpointError: if there is no checkpoint at all: the store itself may be gone.
        """
        marker = read_marker(self.store, f"{_folder(iteration)}/{MARKER}", MARKER)
        # A store that is not mounted looks like this. It must not count as damage, which all give up.
        if marker is None and not self._all():
            raise CheckpointError(
                f"There are no checkpoints in {self.store.url}: is it mounted, and the right one?"
            )
        if marker is None:
            raise DamagedCheckpointError(f"the file {MARKER} is gone", file=MARKER)
        # Of a part whose digest the marker lacks no list of files is the right one: it is damaged.
        digests = marker["digests"]
        return {int(rank): SavedPart(path, digests.get(path, "")) for rank, path in marker["parts"].items()}

    def layers_of(self, iteration: int) -> dict[int, tuple[int, ...]]:
        """The layers of a LayerStack in each worker's part, by rank. Empty if the model was none."""
        marker = self._intact_marker(iteration) or {}
        return {int(rank): tuple(layers) for rank, layers in marker.get("layers", {}).items()}

    def layout_of(self, iteration: int) -> tuple[int, ...]:
        """The number of layers of a LayerStack on each stage. Empty if the model was none."""
        return tuple((self._intact_marker(iteration) or {}).get("layout", ()))

    def part_of(self, iteration: int, rank: int) -> SavedPart:
        """A worker's part of a committed checkpoint.

        Raises:
            CheckpointError: if it cannot be found, as :meth:`parts_of` says.
        """
        part = self.parts_of(iteration).get(rank)
        if part is None:
            raise CheckpointError(
                f"The checkpoint of iteration {iteration} in {self.store.url} has no part of worker {rank}.",
                iteration=iteration,
                rank=rank,
            )
        return part

    def reader(self, part: SavedPart, near: NearFiles | None = None) -> PartReader:
        """Reads a part, and verifies all that it reads.

        Args:
            part: a committed checkpoint's.
            near: copies of its files that are asked for first.

        Raises:
            DamagedCheckpointError: if the list of its files is not what was written.
        """
        return PartReader(self.store, part.path, read_manifest(self.store, part.path, part.digest), near)

    def fetch_of(self, part: SavedPart) -> FetchRanges | None:
        """Fetches ranges of a part's tensors from whoever has them; None where its files are read."""
        return None

    def check_anchor(self) -> None:
        """See whether the store is there at all: a file may be gone since the whole store is."""
        self.store.check_anchor()

    def clean(self, kept: Sequence[int], generation: int, run_id: str) -> None:
        """Delete what is older than the newest checkpoint that counts, but those to keep.

        A clean-up may come late: its worker was frozen, or the store slow. All workers may then have gone
        back to an older checkpoint, and be saving the same iterations again. So parts of later generations
        are left alone.

        Args:
            kept: the committed checkpoints to keep, oldest first.
            generation: in which these counted.
            run_id: of this run. Generations of an earlier one have nothing to do with this one's.
        """
        for name in self._all():
            # Those after the newest one that counts may be being saved now.
            if int(name) < kept[-1] and int(name) not in kept and not self._newer(name, generation, run_id):
                self.store.delete(f"{_ROOT}/{name}", recursive=True)
        for iteration in kept:
            self._delete_orphans(iteration, generation, newest=iteration == kept[-1])

    def withdraw(self, after: int, generation: int, run_id: str) -> None:
        """Delete the markers of newer checkpoints: what they name may be wrong, and a run that is resumed
        would begin with it.

        It may come late, as :meth:`clean` may: what was saved since then counts.

        Args:
            after: the checkpoint that all workers go back to.
            generation: the last one in which what followed was computed so.
            run_id: this run's.
        """
        for name in self._all():
            if int(name) > after and not self._is_saved_since(int(name), generation, run_id):
                self.store.delete(f"{_ROOT}/{name}/{MARKER}")

    def _is_saved_since(self, iteration: int, generation: int, run_id: str) -> bool:
        marker = self._intact_marker(iteration)
        if marker is None or marker["run_id"] != run_id:
            return False
        return any(_generation(part) > generation for part in _names(marker))

    def tidy(self, started_in: Mapping[int, int], workers: int | None = None) -> None:
        """When all workers are done: delete what attempts that failed have left. To be called by worker 0.

        Of checkpoints that were never committed these are the parts of killed processes. A worker that lives
        may be late with its own, if it has waited for the store in vain.

        Args:
            started_in: by rank, the generation in which the worker's present process was started.
            workers: of the job, which may have had more before; None if that is unknown.
        """
        for iteration in self.committed():
            self._delete_orphans(iteration)
        for folder in self.delete_dead(started_in, workers):
            # Where folders are gone with their last file, a living worker may still be uploading a first one.
            if self.store.exists(folder) and not self.store.list(folder):
                self.store.delete(folder, recursive=True)

    def delete_dead(self, started_in: Mapping[int, int], workers: int | None = None) -> list[str]:
        """Delete parts of killed processes from checkpoints that were never committed. For worker 0 only.

        Other workers may be saving there.

        Args:
            started_in: as for :meth:`tidy`.
            workers: likewise.

        Returns:
            The folders of these checkpoints, as they were found.
        """

        def is_dead(name: str) -> bool:
            found = _PART.fullmatch(name)
            if found is None:
                return name.startswith(f"{MARKER}.")  # nobody else writes markers
            rank = int(found["rank"])
            left = workers is not None and rank >= workers
            return left or int(found["generation"]) < started_in.get(rank, 0)

        folders = self.uncommitted()
        for folder in folders:
            for name in filter(is_dead, self.store.list(folder)):
                self.store.delete(f"{folder}/{name}", recursive=True)
        # No listing shows a part of which not even the first file was complete.
        uploads = self.store.abandoned_uploads(_ROOT)
        for part in sorted({path.rpartition("/")[0] for path in uploads}):
            if is_dead(part.rpartition("/")[2]):
                self.store.abort_uploads(f"{_ROOT}/{part}")
        return folders

    def sweep(self) -> None:
        """Delete all that belongs to no committed checkpoint. Only a run that has not begun may do this."""
        for path in self.uncommitted():
            self.store.delete(path, recursive=True)
        self.store.abort_uploads(_ROOT)  # also where no listing shows a folder
        for iteration in self.committed():
            self._delete_orphans(iteration)

    def sweep_drafts(self, ranks: Collection[int]) -> None:
        """Delete what workers that have ended were writing into their parts."""
        for name in self._all():
            for part in self.store.list(f"{_ROOT}/{name}"):
                if (found := _PART.fullmatch(part)) and int(found["rank"]) in ranks:
                    self.store.sweep(f"{_ROOT}/{name}/{part}")

    def uncommitted(self) -> list[str]:
        """The folders of checkpoints that are being saved, or that were never complete."""
        folders = (f"{_ROOT}/{name}" for name in self._all())
        return [folder for folder in folders if not self.store.exists(f"{folder}/{MARKER}")]

    def orphans(self, iteration: int, generation: int | None = None, *, newest: bool = False) -> list[str]:
        """Files that failed attempts left beside a committed checkpoint. Empty if that cannot be known.

        Args:
            iteration: the checkpoint's.
            generation: files of later generations are not garbage.
            newest: another worker may be repeating the commit now, so its temporary file is not garbage.
        """
        folder, marker = _folder(iteration), self._intact_marker(iteration)
        if marker is None:  # the parts may still be needed
            return []
        kept = _names(marker) | {MARKER}

        def is_orphan(name: str) -> bool:
            being_written = name.startswith(f"{MARKER}.") and newest
            later = generation is not None and _generation(name) > generation
            return name not in kept and not being_written and not later

        return [f"{folder}/{name}" for name in self.store.list(folder) if is_orphan(name)]

    def _newer(self, name: str, generation: int, run_id: str) -> bool:
        """Whether a checkpoint has parts of a later generation of this run."""
        named = set[str]()
        with suppress(DamagedCheckpointError):
            marker = read_marker(self.store, f"{_ROOT}/{name}/{MARKER}", MARKER)
            if marker is not None and marker["run_id"] != run_id:
                named = _names(marker)
        parts = {*self.store.list(f"{_ROOT}/{name}")} - named
        return any(_generation(part) > generation for part in parts)

    def _delete_orphans(self, iteration: int, generation: int | None = None, *, newest: bool = False) -> None:
        for path in self.orphans(iteration, generation, newest=newest):
            self.store.delete(path, recursive=True)
        if self._intact_marker(iteration) is not None:
            self.store.abort_uploads(_folder(iteration))  # of attempts that failed

    def _intact_marker(self, iteration: int) -> dict[str, Any] | None:
        """The content of a checkpoint's marker; None if it is missing or damaged."""
        with suppress(DamagedCheckpointError):
            return read_marker(self.store, f"{_folder(iteration)}/{MARKER}", MARKER)
        return None

    def _all(self) -> list[str]:
        return [name for name in self.store.list(_ROOT) if name.isdigit()]


def _folder(iteration: int) -> str:
    return f"{_ROOT}/{iteration:08d}"


def _names(marker: Mapping[str, Any]) -> set[str]:
    return {path.rsplit("/", 1)[-1] for path in marker["parts"].values()}


def _generation(name: str) -> int:
    """In which a part was saved; 0 for other files."""
    found = _PART.fullmatch(name)
    return int(found["generation"]) if found else 0
