"""Loads one worker's state from the parts of all workers: whole, by layer, or by range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from swift_ft.checkpoint.layered_part import StateReader, kinds_of, load_layers, sources_of
from swift_ft.checkpoint.layered_state import LayeredState
from swift_ft.checkpoint.sliced_part import SlicedPart, fits, is_sharded, load_slices
from swift_ft.checkpoint.state_digest import listed
from swift_ft.checkpoint.state_payload import FetchRanges
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import DamagedCheckpointError, TopologyMismatchError
from swift_ft.recovery.job_state import SavedPart
from swift_ft.recovery.layout.stage_layers import StageLayers
from swift_ft.torch_adapters.dcp.verified_files import NearFiles


class SavedParts(Protocol):
    """Has the parts of all workers. :class:`swift_ft.checkpoint.folder.CheckpointFolder` is one."""

    def parts_of(self, iteration: int) -> dict[int, SavedPart]:
        """All parts, by rank."""

    def layers_of(self, iteration: int) -> dict[int, tuple[int, ...]]:
        """The layers of a LayerStack in each worker's part, by rank. Empty if the model is none."""

    def part_of(self, iteration: int, rank: int) -> SavedPart:
        """A worker's part. Raises CheckpointError if there is none."""

    def reader(self, part: SavedPart, near: NearFiles | None = None) -> StateReader:
        """Reads a part, and verifies what it reads."""

    def fetch_of(self, part: SavedPart) -> FetchRanges | None:
        """Fetches ranges of a part's tensors from whoever has them; None where its files are read."""

    def check_anchor(self) -> None:
        """Called where a file is gone. Raises if the whole store is."""


class PartLoader:
    """Loads parts into a state.

    Args:
        folder: has the parts.
        files: copies of files that are nearer; None for none.
        state: is filled.
    """

    def __init__(self, folder: SavedParts, files: NearFiles | None, state: TrainingState) -> None:
        self._folder = folder
        self._files = files
        self._state = state

    def load(self, iteration: int, rank: int, layout: StageLayers | None, workers: int | None) -> None:
        """Load a worker's part: see :meth:`swift_ft.checkpoint.checkpointer.Checkpointer.load`.

        Raises:
            DamagedCheckpointError: it is not what was saved.
            Exception: what the reader raised.
        """
        placed = self._folder.layers_of(iteration) if layout is not None else {}
        if placed and layout is not None:
            self._load_layers(iteration, rank, layout, placed)
            return
        parts = self._folder.parts_of(iteration)
        replicas = len({part.path for part in parts.values()}) == 1 and not is_sharded(self._state)
        others = workers is not None and not replicas
        if others and (len(parts) != workers or self._is_of_another_mesh(parts[rank])):
            self._load_slices(parts, rank)
            return
        part = parts[min(parts)] if replicas else self._folder.part_of(iteration, rank)
        try:
            with self._named(part):
                self._load_part(part)
        except TopologyMismatchError:
            # A worker that has whole tensors cannot load a part with slices as it is.
            if not others or not self._sliced(part).is_sliced:
                raise
            self._load_slices(parts, rank)

    @contextmanager
    def _named(self, part: SavedPart) -> Iterator[None]:
        """Say of which part something is wrong, and what."""
        try:
            yield
        except DamagedCheckpointError as error:
            error.fields.setdefault("path", part.path)
            raise
        except FileNotFoundError as error:
            self._folder.check_anchor()  # the file is gone, and not the whole store
            raise DamagedCheckpointError("a file of it is gone", path=part.path) from error

    def _load_layers(
        self, iteration: int, rank: int, layout: StageLayers, placed: Mapping[int, Sequence[int]]
    ) -> None:
        """Load this worker's layers from the parts that have them."""
        layered, parts = LayeredState(self._state), self._folder.parts_of(iteration)
        sources = sources_of(layered.layers_in(layout), placed, rank)
        first = parts[next(iter(sources))]
        with self._named(first):
            readers = {other: self._folder.reader(parts[other], self._files) for other in sources}
            names = load_layers(readers, sources, layout, layered, self._state)
            if names:
                raise DamagedCheckpointError(
                    f"the loaded state is not what was saved: {listed(names)} differ"
                )

    def _is_of_another_mesh(self, part: SavedPart) -> bool:
        """Whether a worker's own part has other shards than the worker."""
        if not is_sharded(self._state):
            return False
        return not fits(self._sliced(part), self._state)

    def _sliced(self, part: SavedPart) -> SlicedPart:
        """A part, of whose tensors ranges can be read."""
        with self._named(part):
            return SlicedPart(self._folder.reader(part, self._files), self._folder.fetch_of(part))

    def _load_slices(self, parts: Mapping[int, SavedPart], rank: int) -> None:
        """Load this worker's ranges from the parts that have them. Replicas share a part."""
        own = rank if rank in parts else max(parts)
        saved: dict[int, SlicedPart] = {}
        read: set[str] = set()
        for other in (own, *(other for other in parts if other != own)):
            if parts[other].path not in read:
                read.add(parts[other].path)
                saved[other] = self._sliced(parts[other])
        with self._named(parts[own]):
            load_slices(saved, own, self._state)

    def _load_part(self, part: SavedPart) -> None:
        reader = self._folder.reader(part, self._files)
        kinds = kinds_of(reader)
        self._state.check(kinds)
        state = self._state.to_load(kinds)
        reader.fill(state)
        if names := self._state.take_over(state):
            raise DamagedCheckpointError(f"the loaded state is not what was saved: {listed(names)} differ")
