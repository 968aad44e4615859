"""Hands a worker's state to the next world: from memory to memory, as a checkpoint that no store holds.

A worker of the next world reads what it needs from those that offer it: from the one of its own rank if there
are as many workers and none was lost, else a replica's state from the nearest.
What comes is what was offered, by its digest, or it is not used. After a loss that may be copies in memory,
of lost workers' states, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swift_ft.checkpoint.memory_copy import Block, payload_of
from swift_ft.checkpoint.part_loading import PartLoader
from swift_ft.checkpoint.sliced_part import is_sharded
from swift_ft.checkpoint.state_payload import FetchRanges, StatePayload
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.config.worker_context import WorkerContext
from swift_ft.errors import CheckpointError, SwiftError, UsageError
from swift_ft.host.heap import map_ahead
from swift_ft.network import JobSecret
from swift_ft.network.peer_server import WORLDS
from swift_ft.program.open_files import flush_open_files
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Layouts, SavedPart, State
from swift_ft.recovery.layout.stage_layers import StageLayers
from swift_ft.recovery.worlds import Change, OfferedState
from swift_ft.runtime.peer_files import PeerFiles
from swift_ft.runtime.worlds.ranges import OfferedPart, OfferedTensors, source_of


class Handover:
    """See :class:`swift_ft.runtime.worker.ports.Handover`.

    Args:
        context: the worker's place.
        state: what is handed over.
        peers: serves files to other workers, and opens theirs.
        layout: has the layers that a state has in which a plan was made; None if no layer can move.
        copy_of: the copy of a worker's state at an iteration that is in this one's memory.
    """

    def __init__(
        self,
        context: WorkerContext,
        state: TrainingState,
        peers: PeerFiles,
        layout: Callable[[State], StageLayers | None],
        copy_of: Callable[[int, int], Block],
    ) -> None:
        self._context = context
        self._state = state
        self._peers = peers
        self._layout = layout
        self._copy_of = copy_of
        self._offered: dict[int, OfferedTensors] = {}

    def make_ready(self) -> None:
        """See :class:`swift_ft.runtime.worker.ports.Handover`."""
        self._state.to_save()  # what is only set up at its first use is so now
        map_ahead(lambda: False)  # else each page of the state would be mapped and cleared as it comes

    def offer(self, state: State, iteration: int) -> ev.Event:
        """See :class:`swift_ft.runtime.worker.ports.Handover`."""
        flush_open_files()  # this process may end without another line of the script
        change, own = state.worlds.change, self._context.rank
        rank, holder = own, None
        if change is not None and change.copies:
            rank, holder = change.owed_by(own)[0], own
            payload = payload_of(self._copy_of(rank, iteration))
        else:
            payload = self._own_state()
        offered = OfferedTensors(payload)
        self._offered = {**self._offered, rank: offered}
        address = self._peers.serve(WORLDS, source_of(self._offered))
        return ev.StateOffered(
            rank=rank,
            generation=state.generation,
            iteration=iteration,
            address=address,
            digest=offered.digest,
            size=offered.size,
            holder=holder,
        )

    def _own_state(self) -> StatePayload:
        try:
            return StatePayload.of(self._state.to_save())
        except SwiftError:
            raise
        except Exception as error:  # of a state_dict() of the script, say
            raise CheckpointError(f"it cannot be saved: {error!r}", rank=self._context.rank) from error

    def withdraw(self) -> None:
        """See :class:`swift_ft.runtime.worker.ports.Handover`."""
        if self._offered:
            self._peers.stop(WORLDS)
            self._offered = {}

    def take(self, state: State) -> ev.Event:
        """See :class:`swift_ft.runtime.worker.ports.Handover`."""
        change, pending = state.worlds.change, state.layouts.pending
        assert change is not None
        assert pending is not None
        rank = self._context.rank
        # As a plan of the next world finds it: its script begins with a layout of its own.
        layout = self._layout(dataclasses.replace(state, layouts=Layouts()))
        placed = state.layouts.placed if layout is not None else {}
        offers = _OfferedStates(
            _nearest(state, change, self._context),
            {rank: at for rank, at in placed.items() if rank in change.offered},
            self._context.secret,
        )
        # Ranges are asked for, even of as many workers: their layout may be another one.
        workers = None if not is_sharded(self._state) else 0
        try:
            PartLoader(offers, None, self._state).load(pending.iteration, rank, layout, workers)
        except (CheckpointError, UsageError):
            raise
        except Exception as error:
            raise CheckpointError(f"what is offered cannot be read: {error!r}", rank=rank) from error
        own, peers = offers.received(self._context.machine)
        return ev.StateTaken(rank=rank, world=change.world.number, own=own, peers=peers)


def _nearest(state: State, change: Change, context: WorkerContext) -> dict[int, OfferedState]:
    """For each worker of the present world the offer to read: of replicas the nearest, dealt to readers.

    After a loss only some offer: a lost one's state is read from another replica, and ranks are others. In a
    world of as many workers each goes on as the one of its rank, with the variables that this one has for
    itself.
    """
    offered = change.offered
    rank_stays = not change.held and len(offered) == context.world_size
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
        if rank_stays and context.rank in here:
            nearest = context.rank
        found.update(dict.fromkeys(ranks, offered[nearest]))
    return dict(sorted(found.items()))


def _name_of(offer: OfferedState) -> str:
    """The name of a part, in errors: replicas share one."""
    return f"the state of worker {offer.rank}"


@dataclass(frozen=True, slots=True)
class _OfferedStates:
    """The states that the present world offers: :class:`swift_ft.checkpoint.part_loading.SavedParts`.

    Attributes:
        offers: by rank.
        placed: the layers of a LayerStack in each of them.
        secret: the job's.
    """

    offers: Mapping[int, OfferedState]
    placed: Mapping[int, Sequence[int]]
    secret: JobSecret
    _readers: dict[str, OfferedPart] = field(default_factory=dict)

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
        return self.parts_of(iteration)[rank]

    def layers_of(self, iteration: int) -> dict[int, tuple[int, ...]]:
        """By rank, the layers of a LayerStack."""
        return {rank: tuple(layers) for rank, layers in sorted(self.placed.items())}

    def reader(self, part: SavedPart, near: Any = None) -> OfferedPart:
        """Reads one state that is offered."""
        if part.path not in self._readers:
            offer = next(offer for offer in self.offers.values() if _name_of(offer) == part.path)
            self._readers[part.path] = OfferedPart(offer.address, offer.rank, self.secret, part.digest)
        return self._readers[part.path]

    def fetch_of(self, part: SavedPart) -> FetchRanges | None:
        """Only the ranges that are needed come."""
        return self.reader(part).fetch

    def check_anchor(self) -> None:
        """There is no store that may be gone."""

    def received(self, machine: str) -> tuple[int, int]:
        """Bytes of tensors that came from a machine, and from all others."""
        own = {_name_of(offer) for offer in self.offers.values() if offer.machine == machine}
        here = sum(reader.received for name, reader in self._readers.items() if name in own)
        return here, sum(reader.received for reader in self._readers.values()) - here
