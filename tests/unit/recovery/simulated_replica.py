"""A data-parallel worker of the simulated network: buckets of gradients, undo, state on its way.

A parameter's value lists the averages that it contains, so that a lost, repeated or foreign update shows. An
average is named by its iteration and by the state that it was computed from: all replicas must contribute
the same name. What an inexact undo leaves behind is part of the value: who takes back the same is the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, cast

from simulated_connection import Mode
from simulated_store import Violation
from simulated_worker import Worker

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.ladder import Transfer
from swift_ft.recovery.plan import Way

if TYPE_CHECKING:
    from replicated_simulation import ReplicatedSimulation
    from simulated_machine import Machine

__all__ = ["BUCKETS", "HOLDS", "Optimizer", "ReplicaWorker", "Replicated", "Room", "Value"]

HOLDS = ("the model",)
BUCKETS = ((3,), (1, 2), (0,))
"""Parameters by bucket, in the order in which backward fills them."""
_PARAMETERS = 4
_TAIL = len(BUCKETS)
"""Number of an all-reduce after the optimizer's step (a loss to be printed)."""


class Optimizer(Enum):
    """When parameters are updated, and whether that can be taken back."""

    WAIT_FREE = "each bucket when its average is there; can undo"
    WRAPPED = "all at the end; can undo"
    PLAIN = "all at the end; cannot undo"


@dataclass(frozen=True, slots=True)
class Value:
    """One parameter.

    Attributes:
        applied: the averages that it contains, in order, as (iteration, name).
        traces: where it began, and what undos left behind.
    """

    applied: tuple[tuple[int, int], ...] = ()
    traces: tuple[Hashable, ...] = ()

    def updated(self, average: tuple[int, int]) -> Value:
        return replace(self, applied=(*self.applied, average))

    def undone(self, average: tuple[int, int], exact: bool) -> Value:
        if self.applied[-1:] != (average,):
            raise Violation(f"{average} is taken back from {self}")
        return Value(self.applied[:-1], self.traces if exact else (*self.traces, average))


@dataclass(frozen=True, slots=True)
class Replicated:
    """A replica's state.

    Attributes:
        iteration: completed iterations.
        values: by parameter.
        seen: iterations in the running statistics, which are each replica's own.
    """

    iteration: int
    values: tuple[Value, ...]
    seen: tuple[int, ...] = field(default=(), compare=False)

    @property
    def name(self) -> int:
        return hash(self.values)

    def with_values(self, values: Sequence[Value]) -> Replicated:
        return replace(self, values=tuple(values))


@dataclass(slots=True)
class Room:
    """A transfer in a group: who has come, and what was sent so far."""

    arrived: set[int] = field(default_factory=set)
    sent: list[Replicated] = field(default_factory=list)


class ReplicaWorker(Worker):
    """One replica. Stages of a step: 0 between steps, 1 backward, 2 the optimizer, 3 the tail, 4 complete."""

    def __init__(self, sim: ReplicatedSimulation, machine: Machine, rank: int, launched: int) -> None:
        super().__init__(sim, machine, rank, launched)
        self.net = sim
        # What the script made: workers that are started together begin from the same values.
        self.memory = Replicated(0, (Value(traces=(launched,)),) * _PARAMETERS)
        self.updated: set[int] = set()
        self.undone: set[int] = set()
        self.average = (0, 0)
        self.begun: Replicated | None = None
        self.seen_after: tuple[int, ...] = ()
        self.sent = 0
        self.arrived: set[int] = set()
        self.turn = 0
        self.incoming: list[Value] = []
        self._acted = False
        self._acts[Mode.TRANSFER] = self._transfer

    @property
    def model(self) -> Replicated:
        """The state, of a worker that has one."""
        assert self.content is not None
        return cast(Replicated, self.content)

    @model.setter
    def model(self, model: Replicated) -> None:
        self.content = model  # type: ignore[assignment]  # the other simulation's contents are chains

    # ----------------------------------------------------------------------------------------- recovery

    def _report(self, state: State) -> None:
        at = None if self.content is None else self.content.iteration
        live, updated = self.content is not None, tuple(sorted(self.updated))
        self.tell(
            ev.Reported(self.rank, state.generation, at, live, (), True, self.dirty, HOLDS, updated=updated)
        )

    def _execute(self, state: State) -> None:
        assert state.plan is not None
        if state.plan.tasks[self.rank].load is None:
            raise Violation(f"{self} has nothing to load, and nothing is replayed here")
        if not self.sim.store.failing_loads:
            self.updated.clear()
        super()._execute(state)

    def _prepare(self, state: State) -> None:
        """Take back what has to be, then form the group."""
        plan = state.plan
        assert plan is not None
        receives = any(t.parameters is None and self.rank in t.targets for t in plan.transfers)
        if self.content is None and not receives:
            if plan.way != Way.START:
                raise Violation(f"{self} has no state, and gets none")
            self.model = self.memory
        for index in plan.tasks[self.rank].undo:
            self._undo(index)
        self._enter(state, plan)

    def _undo(self, index: int) -> None:
        if index not in self.updated:
            raise Violation(f"{self} is to take back the update of {index}, and made {self.updated}")
        if index not in self.undone:
            values = [*self.model.values]
            values[index] = values[index].undone(self.average, self.net.exact)
            self.model = self.model.with_values(values)
            self.undone.add(index)

    # ---------------------------------------------------------------------------------- state on its way

    def _formed(self, state: State) -> None:
        self.mode, self.turn, self.stage = Mode.TRANSFER, 0, 0
        if self.plan is not None and self.plan.transfers:
            self.sim.tempt(0.25, (1, 3, 5, 8, 12, 20, 30))

    def _transfer(self, state: State) -> bool:
        """A bucket of a transfer, in the plan's order."""
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
        shaken = group.broken or self.disturbed(self.view) or bool(group.gone & {*transfer.ranks})
        if self.rank not in room.arrived:
            room.arrived.add(self.rank)
            return True
        ready = room.arrived == {*transfer.ranks}
        if ready and self.rank != transfer.source:
            ready = len(room.sent) > self.stage
        if not ready:
            if shaken:
                self._break_transfer(transfer)
            return shaken
        if shaken and self.sim.rng.random() < 0.5:  # else it was on its way already
            self._break_transfer(transfer)
        elif self.rank == transfer.source:
            room.sent.append(self.model)
            self._next_bucket(transfer)
        else:
            self._receive_bucket(transfer, room.sent[self.stage])
        return True

    def _receive_bucket(self, transfer: Transfer, sent: Replicated) -> None:
        """Survivors put what comes aside; who has nothing to lose writes it where it belongs."""
        numbers = transfer.parameters or BUCKETS[self.stage]
        indices = (numbers[self.stage],) if transfer.parameters else numbers
        target = self.memory if self.content is None else self.model
        if self.stage == 0:
            self.incoming = [*target.values]
        for index in indices:
            self.incoming[index] = sent.values[index]
        if self.content is None:
            self.memory = self.memory.with_values(self.incoming)
        self._next_bucket(transfer)
        if self.stage:
            return
        if transfer.parameters is not None:
            self.model = self.model.with_values(self.incoming)
            self.updated -= {*transfer.parameters}
        else:
            self._take_over(sent)

    def _take_over(self, sent: Replicated) -> None:
        assert self.plan is not None
        if sent.iteration != self.plan.tasks[self.rank].begin:
            raise Violation(f"{self} gets {sent}, and was promised {self.plan.tasks[self.rank]}")
        seen = sent.seen
        if self.content is not None:
            forward = sent.iteration > self.model.iteration
            seen = self.seen_after if forward else self.model.seen
            self.sim.seen["survivor took a whole state"] += 1
        self.model = Replicated(sent.iteration, tuple(self.incoming), seen)
        self.updated.clear()
        self.dirty = None

    def _next_bucket(self, transfer: Transfer) -> None:
        buckets = len(BUCKETS) if transfer.parameters is None else len(transfer.parameters)
        self.sim.tempt(0.1, (1, 2))
        self.stage += 1
        if self.stage == buckets:
            self.stage, self.turn = 0, self.turn + 1

    def _break_transfer(self, transfer: Transfer) -> None:
        assert self.running is not None
        gone = self.sim.group(self.running).gone
        if self.rank != transfer.source:
            if transfer.source in gone:
                who = "the source"
            else:
                who = "a target" if gone & {*transfer.ranks} else "another"
            kind = "whole" if transfer.parameters is None else "parameters"
            self.sim.seen[f"transfer broken at {self.stage}"] += 1
            self.sim.seen[f"transfer of {kind} broken by {who}"] += 1
            if self.content is not None and self.stage and transfer.parameters is None:
                self.sim.seen["survivor kept its own state"] += 1
        self.broken()

    def _settled(self, state: State) -> None:
        """All transfers are done: everybody is equal, whoever gets here first."""
        assert self.plan is not None
        assert self.running is not None
        self.dirty, self.mode, self.stage = None, Mode.RUN, 0
        self.updated.clear()
        if self.model.iteration != self.plan.resume:
            raise Violation(f"{self} goes live in a generation that resumes at {self.plan.resume}")
        self.net.check_settled(self.running, self)
        if state.committed is None and self.plan.way == Way.START:
            self._save(state)

    # ------------------------------------------------------------------------------------------ one step

    def _run(self, state: State) -> bool:
        match self.stage:
            case 0:
                if self._goes_on(state):
                    self._begin_step()
            case 1:
                return self._backward()
            case 2:
                if self.net.optimizer != Optimizer.WAIT_FREE:
                    self._update(range(_PARAMETERS))
                self.stage = 3 if self.net.talks_after else 4
                self.sent = _TAIL
            case 3:
                if self._talk(range(_TAIL, _TAIL + 1)):
                    self.stage = 4
                return self._acted
            case _:
                self._complete()
        return True

    def _begin_step(self) -> None:
        model = self.model
        for value in model.values:
            if [iteration for iteration, _ in value.applied] != [*range(model.iteration)]:
                raise Violation(f"{self} begins iteration {model.iteration} with {value}")
        if model.seen != (*range(model.iteration),):
            raise Violation(f"{self} begins iteration {model.iteration} with statistics of {model.seen}")
        self.average = (model.iteration, hash((model, self.history)))
        self.begun = model
        self.model = replace(model, seen=(*model.seen, model.iteration))
        self.updated, self.undone, self.arrived, self.sent, self.stage = set(), set(), set(), 0, 1

    def _backward(self) -> bool:
        if self._talk(range(len(BUCKETS))):
            self.stage = 2
        return self._acted

    def _talk(self, buckets: range) -> bool:
        """Fill one bucket more, or receive one's average. True when all averages are there."""
        assert self.running is not None
        group = self.sim.group(self.running)
        shaken = group.broken or self.disturbed(self.view) or bool(group.gone)
        full = [b for b in buckets if b < self.sent and b not in self.arrived and self._is_full(b)]
        self._acted = True
        if self.sent < buckets.stop and (not full or self.sim.rng.random() < 0.5):
            if (shaken and self.sim.rng.random() < 0.5) or group.broken:
                self.broken()
                return False
            self._shares(self.sent)[self.rank] = self.average
            self.sent += 1
        elif full:
            if shaken and self.sim.rng.random() < 0.5:
                self.broken()
                return False
            self._receive_average(self.sim.rng.choice(full))
        elif shaken:
            self.broken()
        else:
            self._acted = False
        return self.mode == Mode.RUN and self.arrived >= {*buckets}

    def _shares(self, bucket: int) -> dict[int, tuple[int, int]]:
        assert self.running is not None
        return self.net.shares(self.running, self.model.iteration, bucket)

    def _is_full(self, bucket: int) -> bool:
        return len(self._shares(bucket)) == self.sim.world

    def _receive_average(self, bucket: int) -> None:
        shares = self._shares(bucket)
        if len(set(shares.values())) > 1:
            raise Violation(f"{self} averages gradients of different states: {shares}")
        self.arrived.add(bucket)
        if self.net.optimizer == Optimizer.WAIT_FREE and bucket != _TAIL:
            self._update(BUCKETS[bucket])

    def _update(self, indices: Sequence[int]) -> None:
        values = [*self.model.values]
        for index in indices:
            values[index] = values[index].updated(self.average)
        self.updated |= {*indices}
        self.model = self.model.with_values(values)
        self.sim.tempt(0.05, (1, 1, 2, 3, 5))

    def _complete(self) -> None:
        self.model = replace(self.model, iteration=self.model.iteration + 1)
        self.updated.clear()
        self.stage = 0
        if self.due(self.model.iteration):
            self._save(self.view)
        self._ask_now_and_then()

    def abandon_step(self) -> None:
        """What is under way may still arrive; then everything small is put back."""
        if self.mode == Mode.RUN and self.stage > 0:
            assert self.begun is not None
            for bucket in {*range(self.sent)} - self.arrived if self.stage == 1 else ():
                if self._is_full(bucket) and self.sim.rng.random() < 0.3:
                    self._receive_average(bucket)
            if self.net.optimizer == Optimizer.PLAIN and self.updated:
                self.updated.clear()
                self.dirty = "optimizer"
            elif self.updated:
                self.sim.seen["broken in an update"] += 1
            self.seen_after = self.model.seen
            self.model = replace(self.model, seen=self.begun.seen)
        self.stage = 0

    def break_half_updated(self) -> bool:
        if self.mode != Mode.RUN or self.stage != 3:
            return False
        self.broken()
        return True
