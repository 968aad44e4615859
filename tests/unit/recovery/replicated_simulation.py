"""The simulated network with replicas in place of stages: see `simulation.py`.

Run one seed again, and see its journal:

    python tests/unit/recovery/replicated_simulation.py 4711 --shape 3x1
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

if __name__ == "__main__":  # run as a script: the modules beside this one are the same as for pytest
    sys.path.insert(0, str(Path(__file__).parent))

from simulated_command import main, run_seed
from simulated_faults import FAULTS
from simulated_replica import Optimizer, Replicated, ReplicaWorker, Room, Value
from simulated_store import Violation
from simulated_worker import Worker
from simulation import Outcome, Simulation

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import Plan, Way

__all__ = ["ReplicatedSimulation", "simulate_replicas"]


_FAULTS = FAULTS | {
    "kill_neighbours": 0,
    "corrupt": 0,
    "network": 8,
    "kill_worker": 6,
    "unreadable": 1,
    "timeout": 1,
    "dirty": 3,
}


class ReplicatedSimulation(Simulation):
    """One run of a data-parallel job; see :class:`Simulation`."""

    patience = 0.8

    def __init__(self, seed: int, machines: int, workers: int = 1, *, trace: bool = False) -> None:
        self._rooms: dict[tuple[int, int], Room] = {}
        self._shares: dict[tuple[int, int, int], dict[int, tuple[int, int]]] = {}
        self._settled: dict[int, Replicated] = {}
        super().__init__(seed, machines, workers, trace=trace, worker_class=ReplicaWorker, faults=_FAULTS)
        self.optimizer = self.rng.choice([*Optimizer])
        self.exact = self.rng.random() < 0.2
        self.talks_after = self.rng.random() < 0.4
        self.budget = self.rng.choice((0, 1, 2, 3, 4, 5, 6, 8))

    def room(self, generation: int, number: int) -> Room:
        """Where a generation's transfer takes place."""
        return self._rooms.setdefault((generation, number), Room())

    def shares(self, generation: int, iteration: int, bucket: int) -> dict[int, tuple[int, int]]:
        """What has been contributed to an average, by rank."""
        return self._shares.setdefault((generation, iteration, bucket), {})

    def check_settled(self, generation: int, worker: ReplicaWorker) -> None:
        """Whoever is done with a plan's transfers is equal to all others that are."""
        first = self._settled.setdefault(generation, worker.model)
        if first != worker.model:
            raise Violation(f"{worker} goes live with {worker.model}, others with {first}")
        self.seen["settled"] += 1

    # ------------------------------------------------------------------------------- what differs from stages

    def _content_after(self, iterations: int) -> Replicated:
        value = Value(tuple((i, -1) for i in range(iterations)))
        return Replicated(iterations, (value,) * 4, (*range(iterations),))

    def _check_contents(self, generation: int, plan: Plan, group: list[Worker]) -> None:
        """States become equal after the group is formed; see :meth:`check_settled`."""

    def _check(self, before: State, after: State) -> None:
        super()._check(before, after)
        event = self.events[-1]
        restarted = (
            before.phase == Phase.AGREEING and after.plan is None and after.generation > before.generation
        )
        if restarted and isinstance(event, ev.Reported):
            reports = {**before.reports, event.rank: event}
            if before.must_fall_back is None and any(map(_can_go_on, reports.values())):
                raise Violation(f"all start again, and there is a state to go on from: {reports}")
            self.seen["restarted"] += 1

    def _check_plan(self, state: State, plan: Plan) -> None:
        super()._check_plan(state, plan)
        reports = state.reports
        good = {rank: r for rank, r in reports.items() if _can_go_on(r)}
        forced = self.states[-2].must_fall_back is not None
        if plan.way in (Way.CONTINUE, Way.REPLICA):
            if not good or forced:
                raise Violation(f"nobody has a state to go on from, or none is allowed: {reports}")
            self._check_ladder(plan, good)
        elif good and not forced:
            raise Violation(f"{plan.way}, and there is a state to go on from: {good}")
        elif plan.way == Way.FALLBACK and not forced and "in the middle of an update" not in plan.reason:
            raise Violation(f"a fallback for no known reason: {plan.reason}")
        for rung in _rungs(plan, reports.values()):
            self.seen[f"rung: {rung}"] += 1

    def _check_ladder(self, plan: Plan, good: dict[int, ev.Reported]) -> None:
        """Nobody loses a completed iteration, and nothing is undone where an original is left."""
        if plan.resume != max(r.iteration or 0 for r in good.values()):
            raise Violation(f"somebody goes back to {plan.resume}: {good}")
        standing = {rank: r for rank, r in good.items() if r.iteration == plan.resume}
        copied = {(rank, p) for t in plan.transfers for rank in t.targets for p in t.parameters or ()}
        for rank, report in standing.items():
            for parameter in report.updated:
                original = any(parameter not in other.updated for other in standing.values())
                if original != ((rank, parameter) in copied):
                    raise Violation(f"parameter {parameter} of rank {rank}: {plan.transfers}, {standing}")


def _can_go_on(report: ev.Reported) -> bool:
    return report.live and report.iteration is not None and not report.dirty


def _rungs(plan: Plan, reports: Iterable[ev.Reported]) -> set[str]:
    """Which rungs of the ladder a plan takes."""
    at = {r.rank: r for r in reports}
    found = {"nothing"} if plan.way == Way.CONTINUE else set()
    copied = {(rank, p) for t in plan.transfers for rank in t.targets for p in t.parameters or ()}
    if copied:
        found.add("copy")
    if any((rank, p) not in copied for rank, task in plan.tasks.items() for p in task.undo):
        found.add("undo")
    for transfer in plan.transfers:
        for rank in transfer.targets if transfer.parameters is None else ():
            if at[rank].iteration is None:
                found.add("newcomer")
            elif at[rank].iteration == plan.resume:
                found.add("half updated")
            else:
                found.add("forward")
    return found


def simulate_replicas(seed: int, machines: int, workers: int = 1, *, trace: bool = False) -> Outcome:
    """Run one seed.

    Raises:
        Violation: with the command that runs this seed again.
    """
    sim = ReplicatedSimulation(seed, machines, workers, trace=trace)
    return run_seed(sim, f"python {Path(__file__)} {seed} --shape {machines}x{workers}")


if __name__ == "__main__":
    main(simulate_replicas)
