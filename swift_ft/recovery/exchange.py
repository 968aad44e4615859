"""Where a worker's state stands, and how replicas become equal when the new group stands (paper §4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from swift_ft.recovery.coordinator import Coordinator
from swift_ft.recovery.ladder import Transfer
from swift_ft.recovery.plan import Plan
from swift_ft.recovery.replicated import Replicas
from swift_ft.recovery.rollback import Rollback

__all__ = ["Exchange", "Standing"]


@dataclass(slots=True)
class Standing:
    """A worker's state between iterations.

    Attributes:
        iteration: iterations that it has completed.
        known: there is a state; False before the first one is made or loaded.
        dirty: why it is neither before nor after an iteration, and cannot be brought back, if so.
        updated: indices of the parameters that the interrupted iteration has updated.
    """

    iteration: int = 0
    known: bool = False
    dirty: str | None = None
    updated: tuple[int, ...] = ()

    def is_whole(self) -> None:
        """The state is that of an iteration's end, in all parts."""
        self.known, self.dirty, self.updated = True, None, ()


class Exchange:
    """Gives and takes state, in the plan's order.

    Args:
        rank: this worker.
        standing: where it stands.
        replicas: what holds the state.
        rollback: what an interrupted step put back.
        coordinator: makes the groups.
    """

    def __init__(
        self,
        rank: int,
        standing: Standing,
        replicas: Replicas,
        rollback: Rollback,
        coordinator: Coordinator,
    ) -> None:
        self._rank = rank
        self._standing = standing
        self._replicas = replicas
        self._rollback = rollback
        self._coordinator = coordinator

    def carry_out(self, plan: Plan) -> str | None:
        """Everybody calls it. Returns why it was broken off, or None."""
        for transfer in plan.transfers:
            try:
                with self._coordinator.group.part(transfer.ranks) as group:
                    if self._rank == transfer.source:
                        self._replicas.give(transfer, group)
                    elif self._rank in transfer.targets and transfer.parameters is None:
                        self._take_whole(plan, transfer, group)
                    elif self._rank in transfer.targets:
                        self._replicas.take(transfer, group)
                        taken = frozenset(transfer.parameters or ())
                        self._standing.updated = tuple(p for p in self._standing.updated if p not in taken)
            except RuntimeError as error:
                return str(error).splitlines()[0]
        return None

    def _take_whole(self, plan: Plan, transfer: Transfer, group: dist.ProcessGroup) -> None:
        """Become equal to a replica: as a survivor, or with nothing to lose."""
        standing = self._standing
        self._coordinator.tell_progress(standing.iteration, "receiving")
        at = plan.tasks[self._rank].begin
        survivor = standing.known
        keep_buffers = survivor and at >= standing.iteration
        self._replicas.take_whole(transfer, group, survivor, keep_buffers=keep_buffers)
        if survivor and at > standing.iteration:  # not before: without a source the step is repeated
            self._rollback.forward()
        standing.iteration = at
        standing.is_whole()
