"""A simulated data-parallel job: every worker is a replica of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import Plan, RecoveryMode
from swift_ft.testing.simulation.faults import FAULTS
from swift_ft.testing.simulation.job import SimulatedJob
from swift_ft.testing.simulation.jobs.replica_state import Optimizer, ReplicaState
from swift_ft.testing.simulation.jobs.replica_worker import Replicas, ReplicaWorker
from swift_ft.testing.simulation.machine import Machine
from swift_ft.testing.simulation.store import Violation
from swift_ft.testing.simulation.worker import Worker

FAULTS_OF_REPLICAS = FAULTS | {
    "kill_neighbours": 0,
    "corrupt_log": 0,
    "break_network": 8,
    "kill_worker": 6,
    "fail_loads": 1,
    "pass_deadline_early": 1,
    "break_update": 3,
}


class ReplicatedJob(SimulatedJob):
    """One run of a data-parallel job; see :class:`SimulatedJob`."""

    patience = 0.8

    def __init__(
        self,
        seed: int,
        machines: int,
        workers: int = 1,
        *,
        trace: Callable[[str], None] | None = None,
        faults: Mapping[str, int] = FAULTS_OF_REPLICAS,
        shrinks: bool = False,
    ) -> None:
        self._replicas = Replicas()
        super().__init__(seed, machines, workers, trace=trace, faults=faults, shrinks=shrinks)
        self._replicas.optimizer = self.rng.choice([*Optimizer])
        self._replicas.exact_undo = self.rng.random() < 0.2
        self._replicas.reduces_after_step = self.rng.random() < 0.4
        self.fault_timing.budget = self.rng.choice((0, 1, 2, 3, 4, 5, 6, 8))

    def make_worker(self, machine: Machine, rank: int, started_in: int) -> Worker:
        """Start one replica."""
        return ReplicaWorker(self, machine, rank, started_in, self._replicas)

    def _content_after(self, iterations: int) -> ReplicaState:
        return ReplicaState.after(iterations)

    def _check_contents(self, generation: int, plan: Plan, group: list[Worker]) -> None:
        """States become equal after the group is formed; see :meth:`Replicas.check_equal`."""

    def _check(self, before: State, after: State) -> None:
        super()._check(before, after)
        event = self.events[-1]
        restarted = (
            before.phase == Phase.AGREEING and after.plan is None and after.generation > before.generation
        )
        if restarted and isinstance(event, ev.StatusReported):
            reports = {**before.round.statuses, event.rank: event}
            forced = before.tries.fallback_reason or "failed twice" in (after.tries.fallback_reason or "")
            if not forced and any(map(_is_usable, reports.values())):
                raise Violation(f"all workers restart although one has a usable state: {reports}")
            self.seen["restarted"] += 1

    def _check_plan(self, state: State, plan: Plan) -> None:
        super()._check_plan(state, plan)
        reports = state.round.statuses
        usable = {rank: r for rank, r in reports.items() if _is_usable(r)}
        forced = self.states[-2].tries.fallback_reason is not None or "failed twice" in plan.reason
        if plan.mode in (RecoveryMode.CONTINUE, RecoveryMode.REPLICA):
            if not usable or forced:
                raise Violation(f"no state is usable, or none may be used: {reports}")
            _check_exactness(plan, usable)
        elif usable and not forced:
            raise Violation(f"{plan.mode} although a worker has a usable state: {usable}")
        elif plan.mode == RecoveryMode.FALLBACK:
            known = forced or "in the middle of an update" in plan.reason
            if not known:
                raise Violation(f"a fallback for no known reason: {plan.reason}")
        for way in _ways_to_equality(plan, reports.values()):
            self.seen[f"equal by: {way}"] += 1


def _is_usable(report: ev.StatusReported) -> bool:
    return report.live and report.iteration is not None and not report.dirty


def _check_exactness(plan: Plan, usable: dict[int, ev.StatusReported]) -> None:
    """No completed iteration is lost, and nothing is undone if a replica still has the original."""
    if plan.resume != max(r.iteration or 0 for r in usable.values()):
        raise Violation(f"a worker rolls back to {plan.resume}: {usable}")
    newest = {rank: r for rank, r in usable.items() if r.iteration == plan.resume}
    copied = {(rank, p) for t in plan.transfers for rank in t.targets for p in t.parameters or ()}
    for rank, report in newest.items():
        for parameter in report.updated:
            original = any(parameter not in other.updated for other in newest.values())
            if original != ((rank, parameter) in copied):
                raise Violation(f"parameter {parameter} of rank {rank}: {plan.transfers}, {newest}")


def _ways_to_equality(plan: Plan, reports: Iterable[ev.StatusReported]) -> set[str]:
    """By which steps of the exactness ladder (`recovery/reconcile.py`) a plan makes replicas equal."""
    at = {r.rank: r for r in reports}
    ways = {"nothing"} if plan.mode == RecoveryMode.CONTINUE else set()
    copied = {(rank, p) for t in plan.transfers for rank in t.targets for p in t.parameters or ()}
    if copied:
        ways.add("copy")
    if any((rank, p) not in copied for rank, task in plan.tasks.items() for p in task.undo):
        ways.add("undo")
    for transfer in plan.transfers:
        for rank in transfer.targets if transfer.parameters is None else ():
            if at[rank].iteration is None:
                ways.add("newcomer")
            elif at[rank].iteration == plan.resume:
                ways.add("half updated")
            else:
                ways.add("forward")
    return ways
