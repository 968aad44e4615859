"""A simulated data-parallel worker: buckets of gradients, undo, and transfers of state between replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import RecoveryMode, Task
from swift_ft.recovery.reconcile import Transfer
from swift_ft.runtime.worker.part import Interruption, Round
from swift_ft.testing.simulation.connection import Mode, Ticks
from swift_ft.testing.simulation.jobs.replica_state import (
    BUCKETS,
    LOSS_BUCKET,
    PARAMETERS,
    Optimizer,
    ParameterValue,
    ReplicaState,
)
from swift_ft.testing.simulation.store import Violation
from swift_ft.testing.simulation.worker import Worker
from swift_ft.testing.simulation.world import Group, Host, World

_HOLDS = ("the model",)


@dataclass(slots=True)
class BucketTransfer:
    """A transfer in a group.

    Attributes:
        arrived: ranks that are ready for it.
        sent: the source's state, once per bucket sent.
    """

    arrived: set[int] = field(default_factory=set)
    sent: list[ReplicaState] = field(default_factory=list)


@dataclass(slots=True)
class Replicas:
    """The settings and the exchanges that the replicas of a run share.

    Attributes:
        optimizer: when parameters are updated.
        exact_undo: an undo restores all bits.
        reduces_after_step: an all-reduce follows the optimizer's step.
    """

    optimizer: Optimizer = Optimizer.PLAIN
    exact_undo: bool = False
    reduces_after_step: bool = False
    _transfers: dict[tuple[int, int], BucketTransfer] = field(default_factory=dict)
    _contributions: dict[tuple[int, int, int], dict[int, tuple[int, int]]] = field(default_factory=dict)
    _equal: dict[int, ReplicaState] = field(default_factory=dict)

    def transfer(self, generation: int, number: int) -> BucketTransfer:
        """One of a generation's transfers."""
        return self._transfers.setdefault((generation, number), BucketTransfer())

    def contributions(self, generation: int, iteration: int, bucket: int) -> dict[int, tuple[int, int]]:
        """The contributions to an average so far, by rank."""
        return self._contributions.setdefault((generation, iteration, bucket), {})

    def check_equal(self, generation: int, worker: ReplicaWorker) -> None:
        """After a plan's transfers, a worker is equal to all others.

        Raises:
            Violation: if it is not.
        """
        first = self._equal.setdefault(generation, worker.model)
        if first != worker.model:
            raise Violation(f"{worker} goes live with {worker.model}, others with {first}")


class ReplicaWorker(Worker):
    """One replica. Substeps: 0 between steps, 1 backward, 2 the optimizer, 3 the last all-reduce, 4 complete.

    Attributes:
        memory: the parameters in memory before it has a state: what the script made, or has received so far.
        updated: parameters that the current iteration has updated.
    """

    def __init__(self, world: World, machine: Host, rank: int, started_in: int, replicas: Replicas) -> None:
        super().__init__(world, machine, rank, started_in)
        self._replicas = replicas
        # The script's initial values: workers that are started together have the same.
        self.memory = ReplicaState(0, (ParameterValue(traces=(started_in,)),) * PARAMETERS)
        self.updated: set[int] = set()
        self._undone: set[int] = set()
        self._average = (0, 0)
        self._before_step: ReplicaState | None = None
        self._statistics_after_step: tuple[int, ...] = ()
        self._buckets_sent = 0
        self._buckets_received: set[int] = set()
        self._incoming: list[ParameterValue] = []

    @property
    def model(self) -> ReplicaState:
        """The state of a worker that has one."""
        assert self.content is not None
        return cast(ReplicaState, self.content)

    @model.setter
    def model(self, model: ReplicaState) -> None:
        self.content = model  # type: ignore[assignment]  # in the other kinds of jobs, contents are chains

    # ----------------------------------------------------------------------------------------- recovery

    def _facts(self) -> dict[str, Any]:
        updated = tuple(sorted(self.updated))
        return {"pipeline_known": True, "can_resend": True, "holds": _HOLDS, "updated": updated}

    def load(self, state: State, task: Task) -> None:
        """Load a part, which is whole."""
        super().load(state, task)
        self.updated.clear()

    def open(self, state: State, begin: int) -> None:
        """Check that a worker of a recovery has a checkpoint to load, and go on."""
        if state.phase == Phase.RECOVERING and Round.of(self.rank, state).task.load is None:
            raise Violation(f"{self} has nothing to load, and data-parallel jobs replay nothing")
        super().open(state, begin)

    def prepare(self, round: Round) -> None:
        """Undo what the plan says."""
        self._follow(round)
        plan = round.plan
        receives = any(t.parameters is None and self.rank in t.targets for t in plan.transfers)
        if self.content is None and not receives:
            if plan.mode != RecoveryMode.START:
                raise Violation(f"{self} has no state, and receives none")
            self.model = self.initial(self.memory)
        for index in round.task.undo:
            self._undo(index)

    def _undo(self, index: int) -> None:
        if index not in self.updated:
            raise Violation(f"{self} is to undo the update of {index}, and made {self.updated}")
        if index not in self._undone:
            values = [*self.model.values]
            values[index] = values[index].undone(self._average, self._replicas.exact_undo)
            self.model = self.model.with_values(values)
            self._undone.add(index)

    # ------------------------------------------------------------------------------------------ transfers

    def join(self, round: Round) -> Ticks[str | None]:  # type: ignore[override]  # its driver takes ticks
        """Become equal to the others."""
        self._next_transfer, self.substep = 0, 0
        if round.plan.transfers:
            self.world.provoke_fault(0.25, (1, 3, 5, 8, 12, 20, 30))
        yield from self.stay(Mode.TRANSFER, self._transfer)
        return self._outcome()

    def _transfer(self, state: State) -> bool:
        """A bucket of a transfer, in the plan's order."""
        if (transfer := self._due_transfer()) is None:
            self._transfers_done()
            return True
        assert self.active_generation is not None
        group = self.world.group(self.active_generation)
        progress = self._replicas.transfer(self.active_generation, self._next_transfer)
        failing = self._is_failing(group) or bool(group.gone & {*transfer.ranks})
        if self.rank not in progress.arrived:
            progress.arrived.add(self.rank)
            return True
        ready = progress.arrived == {*transfer.ranks}
        if ready and self.rank != transfer.source:
            ready = len(progress.sent) > self.substep
        if not ready:
            if failing:
                self._break_transfer(transfer)
            return failing
        if failing and self.world.rng.random() < 0.5:  # otherwise the bucket was in flight already
            self._break_transfer(transfer)
        elif self.rank == transfer.source:
            progress.sent.append(self.model)
            self._end_bucket(transfer)
        else:
            self._receive_bucket(transfer, progress.sent[self.substep])
        return True

    def _is_failing(self, group: Group) -> bool:
        return group.broken or self.generation_over(self.view)

    def _receive_bucket(self, transfer: Transfer, sent: ReplicaState) -> None:
        """Survivors receive into a buffer; a worker without a state receives in place."""
        numbers = transfer.parameters or BUCKETS[self.substep]
        indices = (numbers[self.substep],) if transfer.parameters else numbers
        target = self.memory if self.content is None else self.model
        if self.substep == 0:
            self._incoming = [*target.values]
        for index in indices:
            self._incoming[index] = sent.values[index]
        if self.content is None:
            self.memory = self.memory.with_values(self._incoming)
        self._end_bucket(transfer)
        if self.substep:
            return
        if transfer.parameters is not None:
            self.model = self.model.with_values(self._incoming)
            self.updated -= {*transfer.parameters}
        else:
            self._adopt(sent)

    def _adopt(self, sent: ReplicaState) -> None:
        """All buckets of a whole state have come."""
        assert self.plan is not None
        if sent.iteration != self.plan.tasks[self.rank].begin:
            raise Violation(f"{self} receives {sent}, and was promised {self.plan.tasks[self.rank]}")
        statistics = sent.statistics
        if self.content is not None:
            forward = sent.iteration > self.model.iteration
            statistics = self._statistics_after_step if forward else self.model.statistics
            self.world.seen["survivor received a whole state"] += 1
        self.model = ReplicaState(sent.iteration, tuple(self._incoming), statistics)
        self.updated.clear()
        self.core.status.dirty, self.core.status.iteration = None, sent.iteration

    def _end_bucket(self, transfer: Transfer) -> None:
        buckets = len(BUCKETS) if transfer.parameters is None else len(transfer.parameters)
        self.world.provoke_fault(0.1, (1, 2))
        self.substep += 1
        if self.substep == buckets:
            self.substep, self._next_transfer = 0, self._next_transfer + 1

    def _break_transfer(self, transfer: Transfer) -> None:
        assert self.active_generation is not None
        gone = self.world.group(self.active_generation).gone
        if self.rank != transfer.source:
            if transfer.source in gone:
                cause = "the source"
            else:
                cause = "a target" if gone & {*transfer.ranks} else "another"
            kind = "whole" if transfer.parameters is None else "parameters"
            self.world.seen[f"transfer broken at {self.substep}"] += 1
            self.world.seen[f"transfer of {kind} broken by {cause}"] += 1
            if self.content is not None and self.substep and transfer.parameters is None:
                self.world.seen["survivor kept its own state"] += 1
        self.fail_communication()

    def _transfers_done(self) -> None:
        """All replicas are equal, whichever is done first."""
        assert self.plan is not None
        assert self.active_generation is not None
        self.mode = Mode.EQUAL
        self.updated.clear()
        if self.model.iteration != self.plan.resume:
            raise Violation(f"{self} goes live in a generation that resumes at {self.plan.resume}")
        self._replicas.check_equal(self.active_generation, self)
        self.world.seen["became equal"] += 1

    # ------------------------------------------------------------------------------------------ one step

    def _run(self, state: State) -> bool:
        match self.substep:
            case 0:
                self._begin_step()
            case 1:
                return self._backward()
            case 2:
                if self._replicas.optimizer != Optimizer.WAIT_FREE:
                    self._update(range(PARAMETERS))
                self.substep = 3 if self._replicas.reduces_after_step else 4
                self._buckets_sent = LOSS_BUCKET
            case 3:
                if self._all_reduce(range(LOSS_BUCKET, LOSS_BUCKET + 1)):
                    self.substep = 4
                return self._acted
            case _:
                self._complete_step()
        return True

    def _begin_step(self) -> None:
        model = self.model
        for value in model.values:
            if [iteration for iteration, _ in value.applied] != [*range(model.iteration)]:
                raise Violation(f"{self} begins iteration {model.iteration} with {value}")
        if model.statistics != (*range(model.iteration),):
            raise Violation(f"{self} begins iteration {model.iteration} with statistics {model.statistics}")
        self._average = (model.iteration, hash((model, self.history)))
        self._before_step = model
        self.model = replace(model, statistics=(*model.statistics, model.iteration))
        self.updated, self._undone = set(), set()
        self._buckets_sent, self._buckets_received, self.substep = 0, set(), 1

    def _backward(self) -> bool:
        if self._all_reduce(range(len(BUCKETS))):
            self.substep = 2
        return self._acted

    def _all_reduce(self, buckets: range) -> bool:
        """Fill one more bucket, or receive the average of one. True when all averages are there."""
        assert self.active_generation is not None
        group, received = self.world.group(self.active_generation), self._buckets_received
        failing = self._is_failing(group) or bool(group.gone)
        full = [b for b in buckets if b < self._buckets_sent and b not in received and self._is_full(b)]
        self._acted = True
        if self._buckets_sent < buckets.stop and (not full or self.world.rng.random() < 0.5):
            if (failing and self.world.rng.random() < 0.5) or group.broken:
                self.fail_communication()
                return False
            self._contributions(self._buckets_sent)[self.rank] = self._average
            self._buckets_sent += 1
        elif full:
            if failing and self.world.rng.random() < 0.5:
                self.fail_communication()
                return False
            self._receive_average(self.world.rng.choice(full))
        elif failing:
            self.fail_communication()
        else:
            self._acted = False
        return self.mode == Mode.RUN and received >= {*buckets}

    def _contributions(self, bucket: int) -> dict[int, tuple[int, int]]:
        assert self.active_generation is not None
        return self._replicas.contributions(self.active_generation, self.model.iteration, bucket)

    def _is_full(self, bucket: int) -> bool:
        return len(self._contributions(bucket)) == self.size

    def _receive_average(self, bucket: int) -> None:
        contributions = self._contributions(bucket)
        if len(set(contributions.values())) > 1:
            raise Violation(f"{self} averages gradients of different states: {contributions}")
        self._buckets_received.add(bucket)
        if self._replicas.optimizer == Optimizer.WAIT_FREE and bucket != LOSS_BUCKET:
            self._update(BUCKETS[bucket])

    def _update(self, indices: Sequence[int]) -> None:
        values = [*self.model.values]
        for index in indices:
            values[index] = values[index].updated(self._average)
        self.updated |= {*indices}
        self.model = self.model.with_values(values)
        self.world.provoke_fault(0.05, (1, 1, 2, 3, 5))

    def _complete_step(self) -> None:
        self.model = replace(self.model, iteration=self.model.iteration + 1)
        self.updated.clear()
        self._step_done = True

    def interrupted(self, interruption: Interruption) -> None:
        """Buckets in flight may still arrive. Then the running statistics are restored."""
        if self.substep > 0:
            assert self._before_step is not None
            in_flight = {*range(self._buckets_sent)} - self._buckets_received if self.substep == 1 else ()
            for bucket in in_flight:
                if self._is_full(bucket) and self.world.rng.random() < 0.3:
                    self._receive_average(bucket)
            if self._replicas.optimizer == Optimizer.PLAIN and self.updated:
                self.updated.clear()
                self.core.status.dirty = "optimizer"
            elif self.updated:
                self.world.seen["interrupted in an update"] += 1
            self._statistics_after_step = self.model.statistics
            self.model = replace(self.model, statistics=self._before_step.statistics)

    def break_half_updated(self) -> bool:
        """Communication fails after the optimizer's step."""
        if self.mode != Mode.RUN or self.substep != 3:
            return False
        self.fail_communication()
        return True
