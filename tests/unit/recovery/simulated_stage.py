"""A worker of the simulated network whose stage has replicas: it serves, gives state, or goes back.

States are hash chains, as in a pipeline without replicas. What an inexact undo leaves behind shows in all
that is computed afterwards: the generations in which an update was taken back are in the name of its history.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from simulated_connection import Mode
from simulated_store import GENESIS, Content, Violation
from simulated_worker import Worker

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.plan import Way

if TYPE_CHECKING:
    from simulated_machine import Machine
    from staged_simulation import StagedSimulation

__all__ = ["STAGES", "Room", "StageWorker"]

STAGES = 2
"""With more, one could serve an iteration that another takes back: as good as the undo, but no more equal."""
_AVERAGE = 4
"""Number of a step's part: the backward is done, the gradients of all replicas are not averaged yet."""


@dataclass(slots=True)
class Room:
    """A transfer in a group: who has come, and what was sent."""

    arrived: set[int] = field(default_factory=set)
    sent: Content | None = None


class StageWorker(Worker):
    """One replica of one stage; ranks count the stages of the first pipeline first."""

    def __init__(self, sim: StagedSimulation, machine: Machine, rank: int, launched: int) -> None:
        super().__init__(sim, machine, rank, launched)
        self.net = sim
        self.pipeline, self.part = divmod(rank, STAGES)
        self.window: Content | None = None  # the state before the last update, while that can be taken back
        self.updated = False
        self.turn = 0
        self._acts[Mode.TRANSFER] = self._transfer

    @property
    def before(self) -> int | None:
        return self.rank - 1 if self.part else None

    @property
    def after(self) -> int | None:
        return self.rank + 1 if self.part + 1 < STAGES else None

    @property
    def replicas(self) -> list[int]:
        """The others that hold the same stage."""
        return [rank for rank in range(self.part, self.sim.world, STAGES) if rank != self.rank]

    # ----------------------------------------------------------------------------------------- recovery

    def _report(self, state: State) -> None:
        self.flush()
        at = None if self.content is None else self.content.iteration
        live, self.source = at is not None and not self.source, False
        told = ev.Reported(self.rank, state.generation, at, live, (self.part,), True, self.dirty)
        window, updated = (0,) * (self.window is not None), (0,) * self.updated
        holds = (f"stage {self.part}",)
        told = replace(told, holds=holds, pipeline=self.pipeline, serves=self.serves())
        self.tell(replace(told, undoable=window, updated=updated))

    def _execute(self, state: State) -> None:
        assert state.plan is not None
        if state.plan.tasks[self.rank].load is not None and not self.sim.store.failing_loads:
            self.window, self.updated = None, False
        super()._execute(state)

    def _prepare(self, state: State) -> None:
        """Take back what has to be, then form the group."""
        plan = state.plan
        assert plan is not None
        task = plan.tasks[self.rank]
        if self.content is None and not any(self.rank in t.targets for t in plan.transfers):
            if plan.way != Way.START:
                raise Violation(f"{self} has no state, and gets none")
            self.content = GENESIS
        if task.undo and not self.updated:
            if self.window is None or self.window.iteration != task.begin:
                raise Violation(f"{self} is to go back to {task.begin}, and could to {self.window}")
            self.content, self.window, self.updated = self.window, None, True
            self.sim.seen["took an update back"] += 1
        self._enter(state, plan)

    def _history_of(self, state: State) -> int:
        return hash((super()._history_of(state), self.net.undone_before(state.generation)))

    # ---------------------------------------------------------------------------------- state on its way

    def _formed(self, state: State) -> None:
        self.mode, self.turn = Mode.TRANSFER, 0

    def _transfer(self, state: State) -> bool:
        """Give or take a whole state, in the plan's order."""
        assert self.plan is not None
        transfers = self.plan.transfers
        while self.turn < len(transfers) and self.rank not in transfers[self.turn].ranks:
            self.turn += 1
        if self.turn == len(transfers):
            self._settled(state)
            return True
        assert self.running is not None
        transfer, group = transfers[self.turn], self.sim.group(self.running)
        room = self.net.room(self.running, self.turn)
        if self.rank not in room.arrived:
            room.arrived.add(self.rank)
            return True
        if self.rank == transfer.source and room.arrived == {*transfer.ranks}:
            room.sent, self.turn = self.content, self.turn + 1
            return True
        if self.rank != transfer.source and room.sent is not None:
            if self.content is not None and room.sent.iteration < self.content.iteration:
                self.sim.seen["went back by copy"] += 1
            self.net.skip(self, room.sent)
            self.content, self.window, self.updated, self.turn = room.sent, None, False, self.turn + 1
            self.kept = None
            return True
        shaken = group.broken or self.disturbed(self.view) or bool(group.gone & {*transfer.ranks})
        if shaken:
            self.broken()
        return shaken

    def _settled(self, state: State) -> None:
        """All transfers are done: everybody stands where the plan says, and all are of one history."""
        assert self.plan is not None
        assert self.content is not None
        assert self.running is not None
        if self.content.iteration != self.plan.tasks[self.rank].end:
            raise Violation(f"{self} goes live where {self.plan.tasks[self.rank].end} was planned")
        self.net.check_settled(self.running, self)
        self.dirty, self.updated = None, False
        super()._formed(state)

    # ------------------------------------------------------------------------------------------ one step

    def _run(self, state: State) -> bool:
        if self.stage < _AVERAGE or self.content is None:
            return super()._run(state)
        return super()._run(state) if self._average(self.content.iteration) else self._acted

    def _average(self, iteration: int) -> bool:
        """Give the others this worker's gradients, and take theirs. False until all are there."""
        assert self.content is not None
        if self.stage == _AVERAGE:
            sent = [self._send(peer, iteration, self.content.chain, self.history) for peer in self.replicas]
            self.stage += all(sent)
            self._acted = True
            return False
        working = self.mode
        taken = all(self._take(peer, iteration) for peer in self.replicas)
        self._acted = self.mode != working
        return taken

    def _diverged(self, peer: int) -> bool:
        """What an inexact undo left behind is not computed again: checksums show that."""
        if not self.net.undone_before(self.log_generation):
            super()._diverged(peer)
        return self._cannot_go_on("it diverged")

    def _apply(self, iteration: int, history: int) -> None:
        self.window = self.content
        super()._apply(iteration, history)
        self.sim.tempt(0.1, (1, 2, 4, 8))  # while others are one iteration behind
