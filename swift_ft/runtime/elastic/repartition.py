"""Moves layers of a LayerStack between workers, between two iterations.

all stop ──▶ take, send, receive: aside ──▶ all are ready ──▶ settle: the layers are part of the state
                      └── a loss ──▶ settle: what came is dropped, and nothing has changed
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from swift_ft.checkpoint.layered_state import LayeredState
from swift_ft.checkpoint.state_digest import tensor_digests
from swift_ft.checkpoint.state_payload import StatePath, StatePayload, TensorKind, fresh
from swift_ft.checkpoint.step.places import Place
from swift_ft.coordination.groups import Groups
from swift_ft.coordination.participant import Participant
from swift_ft.coordination.progress import ProgressBoard
from swift_ft.errors import UnsupportedError, first_line
from swift_ft.faults.failpoints import Point, hit
from swift_ft.host.memory import available_bytes
from swift_ft.recovery import events as ev
from swift_ft.recovery.events import WorkerReady
from swift_ft.recovery.job_state import State
from swift_ft.recovery.layout.stage_layers import (
    LayerMove,
    StageLayers,
    cuts_of,
    layers_by_rank,
    moves_between,
    pipelines_in,
)
from swift_ft.runtime.pipeline.logged_pipeline import LoggedPipeline
from swift_ft.runtime.replicas.transfer import Link, receive, send
from swift_ft.runtime.worker.part import Part, Round
from swift_ft.runtime.worker.status import WorkerStatus
from swift_ft.torch_adapters.comm_errors import interruption_of
from swift_ft.torch_core.shards import local
from swift_ft.units import format_bytes

_logger = logging.getLogger(__name__)


class Repartition(Part):
    """One worker's layers, and their moves.

    Args:
        pipeline: its stages, whose layers a LayerStack has.
        layered: the part of its state that goes by layer.
        participant: its part in the job.
        groups: the process groups.
        progress: where it publishes what it does.
        on_moved: called when the layers here are others: what refers to the old ones has to be dropped.
    """

    name = "layers"

    def __init__(
        self,
        pipeline: LoggedPipeline,
        layered: LayeredState,
        status: WorkerStatus,
        participant: Participant,
        groups: Groups,
        progress: ProgressBoard,
        on_moved: Callable[[], None],
    ) -> None:
        self._pipeline = pipeline
        self._layered = layered
        self._status = status
        self._participant = participant
        self._groups = groups
        self._progress = progress
        self._on_moved = on_moved
        self._rank = participant.context.rank
        assert pipeline.stack is not None
        self._stack = pipeline.stack
        self._present: StageLayers = self._stack.begun
        self._aside: tuple[StageLayers, list[StatePayload]] | None = None
        self.count = layered.count

    @property
    def same_stage(self) -> Sequence[int]:
        """The ranks of this worker and of those with the same stage in other pipelines."""
        return self._stack.same_stage

    @property
    def _received_bytes(self) -> int:
        """Bytes of the layers that have come and are not part of the state yet."""
        return sum(_bytes_of(payload) for payload in self._aside[1]) if self._aside is not None else 0

    def layout(self, state: State) -> StageLayers:
        """The number of layers of each stage that the job has agreed on, of all pipelines."""
        return state.layouts.current or self._stack.begun

    def _own(self, layout: StageLayers) -> StageLayers:
        return self._stack.cut_of(layout)

    def prepare(self, round: Round) -> None:
        """Have the layers of the layout in which training goes on."""
        if self._status.known:
            self.settle(round.state)
        else:  # all that belongs here is about to come
            self.adopt(round.state)

    def ready(self, ready: WorkerReady) -> WorkerReady:
        """Say how much has come."""
        return replace(ready, received=self._received_bytes)

    def move(self, state: State) -> bool:
        """Give the layers that leave this worker, and take those that come, aside.

        Returns:
            False if another generation is due; this one's layers are what they were.
        """
        assert state.plan is not None
        assert state.plan.new_layout is not None
        new, statuses = state.plan.new_layout, state.round.statuses
        moves = moves_between(
            layers_by_rank(statuses, state.layouts.current),
            layers_by_rank(statuses, new),
            pipelines_in(statuses),
        )
        self._progress.publish(self._status.iteration, "moving")
        if not self._groups.enter_replay_group(state.generation, tuple(sorted(statuses))):
            return False
        began = time.monotonic()
        try:
            arrived = self._exchange(moves)
            self._layered.prepare(self._own(new), arrived)  # all that can fail, before all go on
        # Of the script's `build_layer`, too: this worker declines, and all go on as before.
        except Exception as error:
            interruption, cause = interruption_of(error), first_line(error)
        else:
            # Not state yet: the old layout counts until all are ready (decision 15).
            self._aside = new, arrived
            self._note(moves, arrived, time.monotonic() - began)
            self._groups.keep()
            return True
        # Only now, when the traceback is gone: it holds on to the group.
        if interruption is not None:
            self._groups.on_connection_broken(interruption)
        else:
            self._groups.leave()
            self._participant.append(
                ev.LayoutDeclined(rank=self._rank, generation=state.generation, reason=cause)
            )
        return False

    def _exchange(self, moves: tuple[LayerMove, ...]) -> list[StatePayload]:
        """All moves of this worker, one after the other, in the order that is the same on all workers."""
        group = dist.group.WORLD
        assert group is not None
        arrived = []
        for number, move in enumerate(moves):
            if self._rank not in (move.source, move.target):
                continue
            hit(Point.MOVE, self._status.iteration, number)
            link = Link(group, move.source, move.target)
            if move.source == self._rank:
                send(self._layered.take(move.layers), link)
            else:
                arrived.append(receive(link, _allocate))
        return arrived

    def _note(self, moves: tuple[LayerMove, ...], arrived: list[StatePayload], took_s: float) -> None:
        size = sum(map(_bytes_of, arrived))
        came = [move for move in moves if move.target == self._rank]
        if not came:
            return
        _logger.info(
            "layers %s come from worker %s: %.1f MB in %.2f s",
            ", ".join(str(layer) for move in came for layer in move.layers),
            ", ".join(str(move.source) for move in came),
            size / 1e6,
            took_s,
            extra={"event": "layers_received", "rank": self._rank, "bytes": size, "seconds": took_s},
        )

    def settle(self, state: State) -> None:
        """Have the layers of the job's layout: what came aside becomes state, or is dropped."""
        layout, aside, self._aside = self.layout(state), self._aside, None
        # The job has not agreed on another one: what came for it is dropped (decision 15).
        if layout == self._present:
            self._layered.forget_prepared()
            return
        if aside is not None and aside[0] == layout:
            self._layered.give(self._own(layout), aside[1])
            self._has(layout)

    def adopt(self, state: State) -> StageLayers:
        """The cut of this pipeline, for state that is to come: layers here may be those of another one."""
        layout = self.layout(state)
        if layout != self._present:
            self._has(layout)
        return self._own(layout)

    def give_whole(self, arrived: Sequence[StatePayload]) -> None:
        """Have a state that other pipelines have sent; the first of it has what is in no layer."""
        self._layered.give_whole(self._own(self._present), arrived)
        self._on_moved()

    def take(self, layers: Sequence[int]) -> StatePayload:
        """The state of some layers that are here, and what is in none. The tensors are the live ones."""
        return self._layered.take(layers, rest=True)

    def goes_with_layer(self, place: Place) -> bool:
        """Whether a variable of the script is in a layer, and this worker may not have had that layer before.

        As long as none has moved, the layers of workers with the same stage are as replicas of a model are:
        what each has for itself stays its own.
        """
        return self._layered.layer_of_place(place) is not None and self._may_have_moved

    @property
    def _may_have_moved(self) -> bool:
        cuts = cuts_of(self._stack.begun, self._stack.stages_by_pipeline)
        unlike = {cut for cut in cuts if len(cut) == self._stack.num_stages} != {self._own(self._stack.begun)}
        return unlike or self._participant.state.layouts.changes > 0

    def saved_buffers(self) -> dict[str, int]:
        """Digests of the buffers of layers that a ``state_dict()`` has, by name."""
        return tensor_digests({name: local(buffer) for name, buffer in self._layered.saved_buffers()})

    def _has(self, layout: StageLayers) -> None:
        self._present = layout
        self._pipeline.relaid(self._own(layout), layout)
        self._on_moved()


def _bytes_of(payload: StatePayload) -> int:
    return sum(tensor.nbytes for tensor in payload.tensors.values())


def _allocate(kinds: dict[StatePath, TensorKind]) -> Mapping[StatePath, torch.Tensor]:
    """Memory for layers that come, if there is enough.

    Raises:
        UnsupportedError: there is not.
    """
    needed, left = sum(kind.nbytes for kind in kinds.values()), available_bytes()
    # Declined, all go on as before. Otherwise the kernel might end the process.
    if left is not None and left < needed:
        raise UnsupportedError(
            f"{format_bytes(left)} of memory are left, and the layers that come need {format_bytes(needed)}"
        )
    return fresh(kinds)
