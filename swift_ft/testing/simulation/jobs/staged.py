"""A simulated job of two or more pipelines with two stages each, which are each other's replicas.

A stage that is ahead may have to roll back when one of its replicas was interrupted or lost. Seeds from
:data:`LOST_STAGES` on also lose all replicas of a stage at once, which then replay jointly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from swift_ft.recovery.job_state import State
from swift_ft.recovery.plan import Plan, RecoveryMode, Task
from swift_ft.runtime.worker.part import Round
from swift_ft.testing.simulation.connection import Mode, Ticks
from swift_ft.testing.simulation.faults import FAULTS
from swift_ft.testing.simulation.job import SimulatedJob
from swift_ft.testing.simulation.machine import Machine
from swift_ft.testing.simulation.store import GENESIS, Content, Logged, SharedStore, Violation
from swift_ft.testing.simulation.worker import Worker
from swift_ft.testing.simulation.world import Host, World

LOST_STAGES = 100_000

_FAULTS = FAULTS | {
    "kill_neighbours": 0,
    "corrupt_log": 1,
    "break_network": 8,
    "fail_loads": 1,
    "diverge": 0,
    "break_update": 0,
    "pass_deadline_early": 2,
}


STAGES = 2
"""With more, one could resend an iteration that another undoes: as good as the undo, but not equal."""

_UPDATES_NOTHING = 4
"""Every so many iterations, no parameter is updated: going back from one rounds nothing."""

_AVERAGE = 4
"""The substep in which backward is done, and the gradients of all replicas are not averaged yet."""


class StagedJob(SimulatedJob):
    """One run of pipelines that are each other's replicas; see :class:`SimulatedJob`."""

    patience = 0.8

    def __init__(
        self, seed: int, machines: int, workers: int = 1, *, trace: Callable[[str], None] | None = None
    ) -> None:
        faults = _FAULTS | ({"kill_replicas": 12} if seed >= LOST_STAGES else {})
        super().__init__(seed, machines, workers, trace=trace, faults=faults)
        self.settings.background_rate = self.rng.choice((0.4, 0.04, 0.02))  # writing a part takes longer

    def make_store(self) -> SharedStore:
        """A store that distinguishes skipped iterations from missing ones."""
        store = StageStore()
        self._replicas = StageReplicas(store)
        return store

    def make_worker(self, machine: Machine, rank: int, started_in: int) -> Worker:
        """Start one replica of one stage."""
        return StageWorker(self, machine, rank, started_in, self._replicas)

    def logged(self, sender: int, receiver: int, iteration: int, since_generation: int) -> Logged | str:
        """The messages that a replay can read of a log. It must need no iteration that the sender skipped."""
        entry = super().logged(sender, receiver, iteration, since_generation)
        return "missing" if entry == "not its own" else entry

    def _check_contents(self, generation: int, plan: Plan, group: list[Worker]) -> None:
        """States become equal after the group is formed; see :meth:`StageReplicas.check_equal`."""

    def _check_plan(self, state: State, plan: Plan) -> None:
        super()._check_plan(state, plan)
        if any(task.undo for task in plan.tasks.values()):
            self._replicas.undone_in.append(state.generation)


# A simulated worker whose stage has replicas: it resends, copies a whole state, or undoes an update.
#
# States are hash chains, as in a pipeline without replicas. An inexact undo changes all that is computed
# after it: the generations in which an update was undone are part of the name of the history.


class StageStore(SharedStore):
    """A store whose logs may lack an iteration for a known reason, or hold it twice. A reader notices both.

    Attributes:
        skipped: iterations, with ranks, that a worker completed only by receiving a replica's state.
    """

    def __init__(self) -> None:
        super().__init__()
        self.skipped: set[tuple[int, int]] = set()

    def read_log(self, rank: int, iteration: int, since_generation: int) -> Logged | str:
        """The messages that a worker sent in an iteration, or the reason why they cannot be read."""
        try:
            entry = super().read_log(rank, iteration, since_generation)
        except Violation:  # the iteration was repeated after an inexact undo
            return "of two histories"
        return "not its own" if entry == "missing" and (iteration, rank) in self.skipped else entry


@dataclass(slots=True)
class StateTransfer:
    """A transfer in a group.

    Attributes:
        arrived: ranks that are ready for it.
        sent: the source's state, once it is sent.
    """

    arrived: set[int] = field(default_factory=set)
    sent: Content | None = None


class StageReplicas:
    """The exchanges that the replicas of all stages share.

    Attributes:
        undone_in: generations in which updates were undone.
    """

    def __init__(self, store: StageStore) -> None:
        self.undone_in: list[int] = []
        self._store = store
        self._transfers: dict[tuple[int, int], StateTransfer] = {}
        self._equal: dict[tuple[int, bool], Content | None] = {}

    def transfer(self, generation: int, number: int) -> StateTransfer:
        """One of a generation's transfers."""
        return self._transfers.setdefault((generation, number), StateTransfer())

    def undone_before(self, generation: int) -> tuple[int, ...]:
        """Generations in which updates were undone, up to this one."""
        return tuple(g for g in self.undone_in if g <= generation)

    def skip(self, rank: int, received: Content) -> None:
        """A worker receives a state, and so has no log of the iteration that led to it."""
        self._store.skipped.add((received.iteration - 1, rank))

    def check_equal(self, generation: int, worker: StageWorker) -> None:
        """After its transfers, a worker is equal to all others at the same iteration.

        Raises:
            Violation: if it is not.
        """
        assert worker.plan is not None
        ahead = worker.plan.tasks[worker.rank].resend_from_log
        first = self._equal.setdefault((generation, ahead), worker.content)
        if first != worker.content:
            raise Violation(f"{worker} goes live with {worker.content}, others with {first}")


class StageWorker(Worker):
    """One replica of one stage; ranks count the stages of the first pipeline first."""

    def __init__(
        self, world: World, machine: Host, rank: int, started_in: int, replicas: StageReplicas
    ) -> None:
        super().__init__(world, machine, rank, started_in)
        self.pipeline, self.stage = divmod(rank, STAGES)
        self._replicas = replicas
        self._undo_window: Content | None = None  # the state before the last update, while undo is possible
        self._undone = False

    @property
    def before(self) -> int | None:
        """The worker with the previous stage of the same pipeline."""
        return self.rank - 1 if self.stage else None

    @property
    def after(self) -> int | None:
        """The worker with the next stage of the same pipeline."""
        return self.rank + 1 if self.stage + 1 < STAGES else None

    @property
    def replicas(self) -> list[int]:
        """The other workers that hold the same stage."""
        return [rank for rank in range(self.stage, self.world.world_size, STAGES) if rank != self.rank]

    # ----------------------------------------------------------------------------------------- recovery

    def _facts(self) -> dict[str, Any]:
        window, updated = self._undo_window, (0,) * self._undone
        no_update = window is not None and _updates_nothing(window.iteration)
        return {
            "stages": (self.stage,),
            "pipeline_known": True,
            "log_gap_before": self.log_gap_before,
            "holds": (f"stage {self.stage}",),
            "pipeline": self.pipeline,
            "can_resend": self.can_resend(),
            "undoable": (0,) * (window is not None and not no_update),
            "no_update": no_update,
            "updated": updated,
        }

    def load(self, state: State, task: Task) -> None:
        """Load a part, which cannot be undone."""
        super().load(state, task)
        self._undo_window, self._undone = None, False

    def prepare(self, round: Round) -> None:
        """Undo what the plan says."""
        self._follow(round)
        plan, task, status = round.plan, round.task, self.core.status
        if self.content is None and not any(self.rank in t.targets for t in plan.transfers):
            if plan.mode != RecoveryMode.START:
                raise Violation(f"{self} has no state, and receives none")
            self.content = self.initial(GENESIS)
        if task.back and self.content is not None and self.content.iteration != task.begin:
            window = self._undo_window
            if window is None or window.iteration != task.begin:
                raise Violation(f"{self} must roll back to {task.begin}, but its undo window is {window}")
            if bool(task.undo) == _updates_nothing(task.begin):
                raise Violation(f"{self} is to undo {task.undo} of iteration {task.begin}")
            self.content, self._undo_window, self._undone = window, None, bool(task.undo)
            status.iteration = task.begin
            self.world.seen["undid an update" if task.undo else "took back no update"] += 1

    def _history_of(self, state: State) -> int:
        return hash((super()._history_of(state), self._replicas.undone_before(state.generation)))

    # ------------------------------------------------------------------------------------------ transfers

    def join(self, round: Round) -> Ticks[str | None]:  # type: ignore[override]  # its driver takes ticks
        """Become equal to the replicas."""
        self._next_transfer = 0
        yield from self.stay(Mode.TRANSFER, self._transfer)
        if self.mode == Mode.EQUAL:
            return (yield from super().join(round))
        return self._outcome()

    def _transfer(self, state: State) -> bool:
        """Send or receive a whole state, in the plan's order."""
        if (transfer := self._due_transfer()) is None:
            self._transfers_done()
            return True
        assert self.active_generation is not None
        group = self.world.group(self.active_generation)
        progress = self._replicas.transfer(self.active_generation, self._next_transfer)
        if self.rank not in progress.arrived:
            progress.arrived.add(self.rank)
            return True
        if self.rank == transfer.source and progress.arrived == {*transfer.ranks}:
            progress.sent, self._next_transfer = self.content, self._next_transfer + 1
            return True
        if self.rank != transfer.source and progress.sent is not None:
            self._receive_state(progress.sent)
            return True
        failed = group.broken or self.generation_over(self.view) or bool(group.gone & {*transfer.ranks})
        if failed:
            self.fail_communication()
        return failed

    def _receive_state(self, sent: Content) -> None:
        if self.content is not None and sent.iteration < self.content.iteration:
            self.world.seen["rolled back by copy"] += 1
        self._replicas.skip(self.rank, sent)
        self.content, self._undo_window, self._undone = sent, None, False
        self.retained_sends = None
        self.core.status.iteration = sent.iteration
        self._next_transfer += 1

    def _transfers_done(self) -> None:
        """All workers are where the plan says, and all are of one history."""
        assert self.plan is not None
        assert self.content is not None
        assert self.active_generation is not None
        if self.content.iteration != self.plan.tasks[self.rank].end:
            raise Violation(f"{self} goes live where {self.plan.tasks[self.rank].end} was planned")
        self._replicas.check_equal(self.active_generation, self)
        self._undone, self.mode = False, Mode.EQUAL

    # ------------------------------------------------------------------------------------------ one step

    def _run(self, state: State) -> bool:
        if self.substep < _AVERAGE or self.content is None:
            return super()._run(state)
        return super()._run(state) if self._average_gradients(self.content.iteration) else self._acted

    def _average_gradients(self, iteration: int) -> bool:
        """Send this worker's gradients to the replicas, and receive theirs. False until all have come."""
        assert self.content is not None
        if self.substep == _AVERAGE:
            sent = [self._send(peer, iteration, self.content.chain, self.history) for peer in self.replicas]
            self.substep += all(sent)
            self._acted = True
            return False
        mode = self.mode
        received = all(self._recv_and_check(peer, iteration) for peer in self.replicas)
        self._acted = self.mode != mode
        return received

    def _diverged(self, peer: int) -> bool:
        """A replay does not reproduce the effect of an inexact undo. Checksums reveal that."""
        if not self._replicas.undone_before(self.log_generation):
            super()._diverged(peer)
        return self._abort_replay("it diverged")

    def _apply(self, iteration: int, history: int) -> None:
        self._undo_window = self.content
        super()._apply(iteration, history)
        self.world.provoke_fault(0.1, (1, 2, 4, 8))  # while others are one iteration behind


def _updates_nothing(iteration: int) -> bool:
    return iteration % _UPDATES_NOTHING == _UPDATES_NOTHING - 1
