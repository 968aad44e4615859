"""Makes the layers of several pipelines equal, after a loss (paper §4; `recovery/layer_replicas.py`).

receive all that is needed: aside ──▶ it is all there ──▶ it becomes state
└── a loss ──▶ what came is dropped, and nothing has changed
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


class LayerSync:
    """One worker's part in the transfers of a plan.

    Args:
        rank: this worker.
        state: what the session protects.
        repartition: its layers.
        groups: in which state travels.
        progress: where it publishes what it does.
    """

    def __init__(
        self,
        rank: int,
        status: WorkerStatus,
        state: TrainingState,
        repartition: Repartition,
        groups: Groups,
        progress: ProgressBoard,
    ) -> None:
        self._rank = rank
        self._status = status
        self._state = state
        self._repartition = repartition
        self._groups = groups
        self._progress = progress

    def apply_transfers(self, plan: Plan) -> str | None:
        """Do this worker's part in all transfers of a plan. All workers call it.

        Returns:
            Why that was interrupted; None if it was not.
        """
        arrived: list[StatePayload] = []
        for transfer in plan.transfers:
            try:
                with self._groups.subgroup(transfer.ranks) as group:
                    link = Link(group, transfer.source, iteration=self._status.iteration)
                    if self._rank == transfer.source:
                        send(self._packed(transfer), link)
                    elif self._rank in transfer.targets:
                        self._progress.publish(self._status.iteration, "receiving")
                        # Into new tensors: if a source dies, this worker still has its own (decision 39).
                        arrived.append(receive(link, fresh))
            except RuntimeError as error:
                return first_line(error)
        if arrived:
            self._take_over(arrived, plan)
        return None

    def _packed(self, transfer: Transfer) -> StatePayload:
        layers = self._repartition.take(transfer.layers)
        rest = {"layers": layers.plain, "small": self._state.snapshot(), "options": self._options()}
        return StatePayload(layers.tensors, self._state.pack(rest))

    def _take_over(self, arrived: list[StatePayload], plan: Plan) -> None:
        """Only now, when all is here: if a source dies, nothing has changed."""
        rest = [self._state.unpack(payload.plain) for payload in arrived]
        layers = [
            StatePayload(payload.tensors, one["layers"]) for payload, one in zip(arrived, rest, strict=True)
        ]
        self._repartition.give(layers)
        begin = plan.tasks[self._rank].begin
        if not self._status.known or self._status.iteration != begin or self._status.updated:
            # All sources are at the same iteration, so any of them will do.
            self._state.restore(rest[0]["small"])
            self._set_options(rest[0]["options"])
        self._status.iteration = begin
        self._status.set_whole()

    def _options(self) -> dict[str, list[dict[str, Any]]]:
        """Of each optimizer's parameter groups, such as the learning rate that a scheduler has set."""
        return {
            name: [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for name, optimizer in self._state.optimizers.items()
        }

    def _set_options(self, options: Mapping[str, list[dict[str, Any]]]) -> None:
        for name, optimizer in self._state.optimizers.items():
            for group, theirs in zip(optimizer.param_groups, options[name], strict=True):
                group.update(theirs)
