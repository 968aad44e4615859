"""Hands a worker's state to the next world: from memory to memory, as a checkpoint that no store holds.

    /dev/shm/swift-ft-AGENT-MACHINE-w1/rank-00000/   a part of a checkpoint, as worker 0 offers it

A worker of the next world reads what it needs from its own machine's memory, and the rest from the workers
that offer it. Each file is the one that was offered, by its digest, or it is not used.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import torch

from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.manifest import MANIFEST, manifest_from, write_manifest
from swift_ft.checkpoint.sliced_part import file_of_state, is_sharded
from swift_ft.checkpoint.state_payload import FetchRanges, StatePath, TensorKind
from swift_ft.checkpoint.training_state import TrainingState, bytes_of
from swift_ft.config.worker_context import WorkerContext
from swift_ft.errors import CheckpointError, first_line
from swift_ft.host.handover_memory import handover_memory
from swift_ft.host.memory import available_bytes
from swift_ft.network.peer_client import PeerFile
from swift_ft.network.peer_server import WORLDS, files
from swift_ft.program.open_files import flush_open_files
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Layouts, SavedPart, State
from swift_ft.recovery.layout.stage_layers import StageLayers
from swift_ft.recovery.layout.tensors import Ranges
from swift_ft.recovery.worlds import Change, OfferedState
from swift_ft.runtime.peer_files import PeerFiles
from swift_ft.runtime.worlds.ranges import fetch_ranges, with_ranges
from swift_ft.storage.digest import FileDigest
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.reader import PartReader
from swift_ft.torch_adapters.dcp.verified_files import NearFiles
from swift_ft.torch_adapters.dcp.writer import write_part
from swift_ft.units import format_bytes

_ROOM = 1.1
"""Memory that must be left, by byte of the state that is offered."""


class Handover:
    """See :class:`swift_ft.runtime.worker.ports.Handover`.

    Args:
        context: the worker's place.
        state: what is handed over.
        peers: serves files to other workers, and opens theirs.
        layout: has the layers that a state has in which a plan was made; None if no layer can move.
    """

    def __init__(
        self,
        context: WorkerContext,
        state: TrainingState,
        peers: PeerFiles,
        layout: Callable[[State], StageLayers | None],
    ) -> None:
        self._context = context
        self._state = state
        self._peers = peers
        self._layout = layout
        self._offered: Path | None = None

    def offer(self, state: State, iteration: int) -> ev.Event:
        """See :class:`swift_ft.runtime.worker.ports.Handover`."""
        assert state.worlds.change is not None
        flush_open_files()  # this process may end without another line of the script
        context, saved = self._context, self._state.to_save()
        size, left = bytes_of(saved), available_bytes()
        if left is not None and left < _ROOM * size:
            raise CheckpointError(
                f"{format_bytes(left)} of memory are left, and its state has {format_bytes(size)}"
            )
        folder = handover_memory(context.agent_pid, context.machine, state.worlds.change.world.number)
        self._offered = folder / f"rank-{context.rank:05d}"
        store = Store(folder.as_uri())
        try:
            written = write_part(store, self._offered.name, saved, file_of=file_of_state(self._state))
            digest = write_manifest(store, self._offered.name, written)
        except OSError as error:
            # The memory is full; or the change was given up just now, and its agent has freed the folder.
            raise CheckpointError(f"its memory cannot be written: {first_line(error)}") from error
        address = self._peers.serve(WORLDS, with_ranges(files(self._find), saved))
        return ev.StateOffered(
            rank=context.rank,
            generation=state.generation,
            iteration=iteration,
            address=address,
            folder=str(self._offered),
            digest=digest,
            size=sum(file.size for file in written.values()),
        )

    def _find(self, name: str) -> Path:
        if self._offered is None or "/" in name or not (found := self._offered / name).is_file():
            raise FileNotFoundError(name)
        return found

    def withdraw(self) -> None:
        """See :class:`swift_ft.runtime.worker.ports.Handover`."""
        if self._offered is not None:
            self._peers.stop(WORLDS)
            shutil.rmtree(self._offered, ignore_errors=True)
            self._offered = None

    def take(self, state: State) -> ev.Event:
        """See :class:`swift_ft.runtime.worker.ports.Handover`."""
        change, pending = state.worlds.change, state.layouts.pending
        assert change is not None
        assert pending is not None
        context = self._context
        # As a plan of the next world finds it: its script begins with a layout of its own.
        layout = self._layout(dataclasses.replace(state, layouts=Layouts()))
        folder = _OfferedStates(
            Store(handover_memory(context.agent_pid, context.machine, change.world.number).as_uri()),
            _nearest(state, change, context),
            {rank: at for rank, at in state.layouts.placed.items() if rank in change.offered}
            if layout is not None
            else {},
            _Peers(context),
        )
        checkpointer = Checkpointer(folder, self._state)
        checkpointer.files.peer = folder.open
        # Ranges are asked for, even of as many workers: their layout may be another one.
        workers = None if not is_sharded(self._state) else 0
        checkpointer.load(pending.iteration, context.rank, layout, workers)
        loaded = checkpointer.files.take_loaded()
        return ev.StateTaken(
            rank=context.rank,
            world=change.world.number,
            own=loaded.store,
            peers=loaded.peers + folder.peers.ranges,
        )


def _nearest(state: State, change: Change, context: WorkerContext) -> dict[int, OfferedState]:
    """For each worker of the present world the offer to read: of replicas the nearest, dealt to readers.

    After a loss only some offer: a lost one's state is read from another replica.
    """
    offered = change.offered
    alike: dict[object, list[int]] = {}
    for rank in sorted(change.held or offered):
        # Stages of unlike pipelines may have one number, and other layers.
        held = change.held.get(rank) or state.layouts.placed.get(rank) or state.round.statuses[rank].holds
        alike.setdefault(held or rank, []).append(rank)
    found = {}
    for ranks in alike.values():
        if not (here := [rank for rank in ranks if rank in offered]):
            continue  # a LayerStack's layers that others have in other cuts
        dealt = here[context.rank % len(here)]
        nearest = next((rank for rank in here if offered[rank].machine == context.machine), dealt)
        found.update(dict.fromkeys(ranks, offered[nearest]))
    return dict(sorted(found.items()))


class _Peers:
    """Asks those that offer something.

    Attributes:
        machine: the one that asks.
        ranges: bytes of ranges that came.
    """

    def __init__(self, context: WorkerContext) -> None:
        self.machine = context.machine
        self._secret = context.secret
        self.ranges = 0

    def file(self, address: str, name: str) -> IO[bytes]:
        """A file that is offered at an address."""
        return PeerFile(address, self._secret, f"{WORLDS}/{name}").download()

    def fetch(
        self, address: str, asked: Sequence[tuple[StatePath, TensorKind, Ranges]]
    ) -> list[torch.Tensor]:
        """Ranges of tensors that are offered at an address."""
        found = fetch_ranges(address, self._secret, asked)
        self.ranges += sum(tensor.nbytes for tensor in found)
        return found


class _Counts:
    """Counts what is read from the own machine's memory. Nothing is nearer."""

    def __init__(self, near: NearFiles | None) -> None:
        self._near = near

    def nearer(self, path: str, expected: FileDigest | None) -> None:
        """See :class:`swift_ft.torch_adapters.dcp.verified_files.NearFiles`."""

    def from_store(self, size: int) -> None:
        """See :class:`swift_ft.torch_adapters.dcp.verified_files.NearFiles`."""
        if self._near is not None:
            self._near.from_store(size)


@dataclass(frozen=True, slots=True)
class _OfferedStates(CheckpointFolder):
    """The states that the present world offers, as a checkpoint.

    Attributes:
        offers: by rank.
        placed: the layers of a LayerStack in each of them.
        peers: asks other machines.
    """

    offers: Mapping[int, OfferedState]
    placed: Mapping[int, Sequence[int]]
    peers: _Peers

    def parts_of(self, iteration: int) -> dict[int, SavedPart]:
        """By rank, what is offered."""
        return {rank: SavedPart(_name_of(offer), offer.digest) for rank, offer in self.offers.items()}

    def part_of(self, iteration: int, rank: int) -> SavedPart:
        """The state of the same rank, for a model that cannot be cut in another way."""
        if rank not in self.offers:
            raise CheckpointError(
                f"the present world has no worker {rank}, and this model cannot be cut otherwise: the layers "
                "of a LayerStack can, and modules that fully_shard or parallelize_module has cut"
            )
        return CheckpointFolder.part_of(self, iteration, rank)

    def layers_of(self, iteration: int) -> dict[int, tuple[int, ...]]:
        """By rank, the layers of a LayerStack."""
        return {rank: tuple(layers) for rank, layers in sorted(self.placed.items())}

    def reader(self, part: SavedPart, near: NearFiles | None = None) -> PartReader:
        """Reads what one worker offers, here or where that worker is."""
        offer = self._offer(part.path)
        if offer.machine == self.peers.machine:
            own = SavedPart(Path(offer.folder).name, part.digest)
            return CheckpointFolder.reader(self, own, _Counts(near))
        with self.peers.file(offer.address, MANIFEST) as file:
            listed = manifest_from(file.read(), part.digest)
        return PartReader(self.store, part.path, listed, near)

    def open(self, path: str) -> IO[bytes]:
        """Open a file that is offered on another machine."""
        part, _, name = path.rpartition("/")
        return self.peers.file(self._offer(part).address, name)

    def fetch_of(self, part: SavedPart) -> FetchRanges | None:
        """Only the ranges that are needed come from another machine."""
        offer = self._offer(part.path)
        return None if offer.machine == self.peers.machine else partial(self.peers.fetch, offer.address)

    def _offer(self, name: str) -> OfferedState:
        return next(offer for offer in self.offers.values() if _name_of(offer) == name)


def _name_of(offer: OfferedState) -> str:
    """The name of what is offered, unlike all others."""
    return f"{offer.machine}/{Path(offer.folder).name}"
