"""A simulated job of two or more pipelines with two stages each, which are each other's replicas.

A stage that is ahead may have to roll back when one of its replicas was interrupted or lost. Seeds from
:data:`LOST_STAGES` on also lose all replicas of a stage at once, which then replay jointly.
"""

from __future__ import annotations

from collections.abc import Callable

from swift_ft.recovery.job_state import State
from swift_ft.recovery.plan import Plan
from swift_ft.testing.simulation.faults import FAULTS
from swift_ft.testing.simulation.job import SimulatedJob
from swift_ft.testing.simulation.jobs.stage_worker import StageReplicas, StageStore, StageWorker
from swift_ft.testing.simulation.machine import Machine
from swift_ft.testing.simulation.store import Logged, SharedStore
from swift_ft.testing.simulation.worker import Worker

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
        """What a replay can read of a sender's log. It must not need an iteration that the sender skipped."""
        entry = super().logged(sender, receiver, iteration, since_generation)
        return "missing" if entry == "not its own" else entry

    def _check_contents(self, generation: int, plan: Plan, group: list[Worker]) -> None:
        """States become equal after the group is formed; see :meth:`StageReplicas.check_equal`."""

    def _check_plan(self, state: State, plan: Plan) -> None:
        super()._check_plan(state, plan)
        if any(task.undo for task in plan.tasks.values()):
            self._replicas.undone_in.append(state.generation)
