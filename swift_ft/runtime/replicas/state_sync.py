"""The transfers that make replicas equal once the new group is formed (paper §4)."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.coordination.groups import Groups
from swift_ft.coordination.progress import ProgressBoard
from swift_ft.errors import UnsupportedError, first_line
from swift_ft.observe.spans import recorder
from swift_ft.recovery.job_state import State
from swift_ft.recovery.plan import Plan
from swift_ft.recovery.reconcile import Transfer
from swift_ft.runtime.replicas.replicas import Replicas
from swift_ft.runtime.worker.part import Part, Round
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
        with self._replicas.kept_variables(begin, own_at=status.iteration if survivor else None):
            self._replicas.recv_state(transfer, group, survivor, keep_buffers=keep_buffers)
        if keep_buffers:  # only now: if the source dies, nothing has changed
            self._rollback.buffers_of(begin, self._replicas.model)
        status.iteration = begin
        status.set_whole()


class PreparedState(Part):
    """The whole state of one worker, as it is sent first of all.

    Args:
        status: knows whether the state is whole.
        replicas: holds the state, and what was packed.
        only_replicas: the worker has neither a pipeline nor batches that are dealt: nothing changes its state
            between its report and the new group.
    """

    name = "sending"

    def __init__(self, status: WorkerStatus, replicas: Replicas, *, only_replicas: bool) -> None:
        self._status = status
        self._replicas = replicas
        self._only_replicas = only_replicas

    def settle(self, state: State) -> None:
        """Forget what was packed."""
        self._replicas.prepare_state(whole=False)  # the state may be another one now

    def idle(self) -> None:
        """Have ready what this worker may have to send."""
        status = self._status
        whole = status.known and status.dirty is None and not status.updated
        if self._only_replicas and self._replicas.attached and whole:
            with (
                recorder.span("prepare to send"),
                contextlib.suppress(UnsupportedError),  # raised again where the state has to be sent
            ):
                self._replicas.prepare_state(whole=True)

    def prepare(self, round: Round) -> None:
        """Have ready what this worker sends, unless it receives first. Layers are packed as they are sent."""
        plan, task = round.plan, round.task
        own = [t for t in plan.transfers if round.rank == t.source or round.rank in t.targets]
        first = own[0] if own else None
        whole = (
            first is not None and first.source == round.rank and first.parameters is None and not first.layers
        )
        kept = task.load is None and not (task.undo or task.back) and plan.parts_from is None
        with recorder.span("prepare to send"):
            self._replicas.prepare_state(whole=whole, unchanged=kept and self._only_replicas)
