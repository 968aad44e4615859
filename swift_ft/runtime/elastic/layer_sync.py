"""Makes the layers of several pipelines equal, after a loss (paper §4; `recovery/layer_replicas.py`).

receive all that is needed: aside ──▶ it is all there ──▶ it becomes state
└── a loss ──▶ what came is dropped, and nothing has changed
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from swift_ft.checkpoint.state_payload import StatePayload, fresh
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.coordination.groups import Groups
from swift_ft.coordination.progress import ProgressBoard
from swift_ft.errors import first_line
from swift_ft.recovery.plan import Plan
from swift_ft.recovery.reconcile import Transfer
from swift_ft.runtime.elastic.repartition import Repartition
from swift_ft.runtime.replicas.transfer import Link, receive, send
from swift_ft.runtime.worker.status import WorkerStatus


class Kept(Protocol):
    """See :class:`LayerSync`."""

    def __call__(self, iteration: int, *, own_at: int | None) -> AbstractContextManager[None]:
        """The block for what is taken over."""


class LayerSync:
    """One worker's part in the transfers of a plan.

    Args:
        rank: this worker.
        state: what the session protects.
        repartition: its layers.
        groups: in which state travels.
        progress: where it publishes what it does.
        kept: within the block that it makes, for an iteration, variables of the script stay that a worker has
            for itself; ``own_at`` as in :meth:`OwnVariables.kept`.
    """

    def __init__(
        self,
        rank: int,
        status: WorkerStatus,
        state: TrainingState,
        repartition: Repartition,
        groups: Groups,
        progress: ProgressBoard,
        kept: Kept,
    ) -> None:
        self._rank = rank
        self._status = status
        self._state = state
        self._repartition = repartition
        self._groups = groups
        self._progress = progress
        self._kept = kept

    def apply_transfers(self, plan: Plan) -> str | None:
        """Do this worker's part in all transfers of a plan. All workers call it.

        Returns:
            Why that was interrupted; None if it was not.
        """
        arrived: list[tuple[Transfer, StatePayload]] = []
        for transfer in plan.transfers:
            try:
                with self._groups.subgroup(transfer.ranks) as group:
                    link = Link(group, transfer.source, iteration=self._status.iteration)
                    if self._rank == transfer.source:
                        send(self._packed(transfer), link)
                    elif self._rank in transfer.targets:
                        self._progress.publish(self._status.iteration, "receiving")
                        # Into new tensors: if a source dies, this worker still has its own (decision 39).
                        arrived.append((transfer, receive(link, fresh)))
            except RuntimeError as error:
                return first_line(error)
        if arrived:
            # What is in no layer comes from where most of the layers were: it has the most like stage.
            arrived.sort(key=lambda one: -len(one[0].layers))
            self._take_over([payload for _, payload in arrived], plan)
        return None

    def _packed(self, transfer: Transfer) -> StatePayload:
        layers = self._repartition.take(transfer.layers)
        rest = {"layers": layers.plain, "small": self._state.snapshot()}
        return StatePayload(layers.tensors, self._state.pack(rest))

    def _take_over(self, arrived: list[StatePayload], plan: Plan) -> None:
        """Only now, when all is here: if a source dies, nothing has changed."""
        rest = [self._state.unpack(payload.plain) for payload in arrived]
        layers = [
            StatePayload(payload.tensors, one["layers"]) for payload, one in zip(arrived, rest, strict=True)
        ]
        begin = plan.tasks[self._rank].begin
        own_at = self._status.iteration if self._status.known else None
        with self._kept(begin, own_at=own_at):
            self._repartition.give_whole(layers)
        self._state.restore(rest[0]["small"])  # after the variables, as everywhere
        self._status.iteration = begin
        self._status.set_whole()
