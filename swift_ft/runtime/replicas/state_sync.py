"""The transfers that make replicas equal once the new group is formed (paper §4)."""

from __future__ import annotations

from contextlib import nullcontext

import torch.distributed as dist

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.coordination.groups import Groups
from swift_ft.coordination.progress import ProgressBoard
from swift_ft.errors import first_line
from swift_ft.recovery.plan import Plan
from swift_ft.recovery.reconcile import Transfer
from swift_ft.runtime.replicas.replicas import Replicas
from swift_ft.runtime.worker.status import WorkerStatus


class StateSync:
    """Sends and receives state, in the plan's order.

    Args:
        rank: this worker.
        status: of the worker's state.
        replicas: holds the state.
        rollback: what an interrupted step put back.
        groups: makes the group of each transfer.
        progress: where this worker publishes what it does.
    """

    def __init__(
        self,
        rank: int,
        status: WorkerStatus,
        replicas: Replicas,
        rollback: Rollback,
        groups: Groups,
        progress: ProgressBoard,
    ) -> None:
        self._rank = rank
        self._status = status
        self._replicas = replicas
        self._rollback = rollback
        self._groups = groups
        self._progress = progress

    def apply_transfers(self, plan: Plan) -> str | None:
        """Do this worker's part in all transfers of a plan. All workers call it.

        Returns:
            Why that was interrupted; None if it was not.
        """
        for transfer in plan.transfers:
            try:
                with self._groups.subgroup(transfer.ranks) as group:
                    self._apply(plan, transfer, group)
            except RuntimeError as error:
                return first_line(error)
        return None

    def _apply(self, plan: Plan, transfer: Transfer, group: dist.ProcessGroup) -> None:
        if self._rank == transfer.source:
            self._replicas.send_state(transfer, group)
        elif self._rank in transfer.targets and transfer.parameters is None:
            self._recv_whole(plan, transfer, group)
        elif self._rank in transfer.targets:
            self._replicas.recv_parameters(transfer, group)
            received = frozenset(transfer.parameters or ())
            self._status.updated = tuple(p for p in self._status.updated if p not in received)

    def _recv_whole(self, plan: Plan, transfer: Transfer, group: dist.ProcessGroup) -> None:
        """Become equal to a replica: as a survivor, or as a replacement, which has nothing to lose."""
        status = self._status
        self._progress.publish(status.iteration, "receiving")
        begin = plan.tasks[self._rank].begin
        survivor = status.known
        # Of its own data; buffers that are equal on all replicas come with the state.
        keep_buffers = survivor and not self._replicas.equal_buffers and self._rollback.has_buffers_of(begin)
        own = self._replicas.own_variables
        with own.kept(self._replicas.ranks) if own is not None else nullcontext():
            self._replicas.recv_state(transfer, group, survivor, keep_buffers=keep_buffers)
        if keep_buffers:  # only now: if the source dies, nothing has changed
            self._rollback.buffers_of(begin, self._replicas.model)
        status.iteration = begin
        status.set_whole()
