"""The simulated network with two pipelines of two stages, or more of them: see `simulation.py`.

Here a stage that is ahead may have to go back: where one of its replicas was cut off, or was lost. Seeds from
:data:`LOST_STAGES` on also lose all replicas of a stage at once, which replay jointly then.

Run one seed again, and see its journal:

    python tests/unit/recovery/staged_simulation.py 4711 --shape 4x1
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # run as a script: the modules beside this one are the same as for pytest
    sys.path.insert(0, str(Path(__file__).parent))

from simulated_command import main, run_seed
from simulated_faults import FAULTS
from simulated_stage import Room, StageWorker
from simulated_store import Content, Logged, SharedStore, Violation
from simulated_worker import Worker
from simulation import Outcome, Simulation

from swift_ft.recovery.job_state import State
from swift_ft.recovery.plan import Plan

__all__ = ["LOST_STAGES", "StagedSimulation", "simulate_stages"]

LOST_STAGES = 100_000

_FAULTS = FAULTS | {
    "kill_neighbours": 0,
    "corrupt": 1,
    "network": 8,
    "unreadable": 1,
    "diverge": 0,
    "dirty": 0,
    "timeout": 2,
}


class StagedStore(SharedStore):
    """A store whose logs may lack an iteration for a reason, or hold it twice; whoever reads them finds out.

    Attributes:
        skipped: iterations, with ranks, that a worker has only completed by taking a replica's state.
    """

    def __init__(self) -> None:
        super().__init__()
        self.skipped: set[tuple[int, int]] = set()

    def read_log(self, rank: int, iteration: int, since_generation: int) -> Logged | str:
        try:
            found = super().read_log(rank, iteration, since_generation)
        except Violation:  # it was repeated after an inexact undo
            return "of two histories"
        return "not its own" if found == "missing" and (iteration, rank) in self.skipped else found


class StagedSimulation(Simulation):
    """One run of pipelines that are each other's replicas; see :class:`Simulation`."""

    patience = 0.8

    def __init__(self, seed: int, machines: int, workers: int = 1, *, trace: bool = False) -> None:
        self._rooms: dict[tuple[int, int], Room] = {}
        self._settled: dict[tuple[int, bool], Content | None] = {}
        self._undone: list[int] = []
        faults = _FAULTS | ({"kill_replicas": 12} if seed >= LOST_STAGES else {})
        super().__init__(seed, machines, workers, trace=trace, worker_class=StageWorker, faults=faults)
        self.background_rate = self.rng.choice((0.4, 0.04, 0.02))  # parts are seldom written at once

    def make_store(self) -> SharedStore:
        return StagedStore()

    def skip(self, worker: StageWorker, to: Content) -> None:
        """A worker takes a state over, and so has no log of the iteration that led to it."""
        assert isinstance(self.store, StagedStore)
        self.store.skipped.add((to.iteration - 1, worker.rank))

    def logged(self, sender: int, receiver: int, iteration: int, since_generation: int) -> Logged | str:
        found = super().logged(sender, receiver, iteration, since_generation)
        return "missing" if found == "not its own" else found  # a replay must not need that

    def room(self, generation: int, number: int) -> Room:
        """Where a generation's transfer takes place."""
        return self._rooms.setdefault((generation, number), Room())

    def undone_before(self, generation: int) -> tuple[int, ...]:
        """Generations in which updates were taken back, up to this one."""
        return tuple(g for g in self._undone if g <= generation)

    def check_settled(self, generation: int, worker: StageWorker) -> None:
        """Whoever is done with a plan's transfers is equal to all others that stand at the same iteration."""
        assert worker.plan is not None
        serves = worker.plan.tasks[worker.rank].serve
        first = self._settled.setdefault((generation, serves), worker.content)
        if first != worker.content:
            raise Violation(f"{worker} goes live with {worker.content}, others with {first}")

    # ------------------------------------------------------------------------ what differs from one pipeline

    def _check_contents(self, generation: int, plan: Plan, group: list[Worker]) -> None:
        """States become equal after the group is formed; see :meth:`check_settled`."""

    def _check_plan(self, state: State, plan: Plan) -> None:
        super()._check_plan(state, plan)
        if any(task.undo for task in plan.tasks.values()):
            self._undone.append(state.generation)


def simulate_stages(seed: int, machines: int, workers: int = 1, *, trace: bool = False) -> Outcome:
    """Run one seed.

    Raises:
        Violation: with the command that runs this seed again.
    """
    sim = StagedSimulation(seed, machines, workers, trace=trace)
    return run_seed(sim, f"python {Path(__file__)} {seed} --shape {machines}x{workers}")


if __name__ == "__main__":
    main(simulate_stages)
