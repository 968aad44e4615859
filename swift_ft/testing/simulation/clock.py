"""Time in a simulated job, which has no clock: machines freeze and thaw, deadlines pass."""

from __future__ import annotations

from collections.abc import Sequence

from swift_ft.costs.survivors_plan import plan_after_loss
from swift_ft.recovery import events as ev
from swift_ft.recovery.guests import guests_wanted
from swift_ft.recovery.job_state import Phase
from swift_ft.recovery.next_pipelines import sizes_of, takes_unlike
from swift_ft.recovery.survivors import answer_of
from swift_ft.testing.simulation.cluster import Cluster
from swift_ft.testing.simulation.connection import Mode
from swift_ft.testing.simulation.machine import Machine
from swift_ft.testing.simulation.worker import Worker
from swift_ft.testing.simulation.world import Host

_FREEZE_RATES = {
    ev.PartPersisted: 0.003,
    ev.CheckpointCommitted: 0.003,
    ev.CheckpointRequested: 0.01,
    ev.ReplayFailed: 0.6,
}
"""The chance that a machine freezes before it writes an event, for events that are very frequent or rare."""
_SMALLER = 0.6
"""The chance that a smaller world is to answer a loss although a machine could come."""
_GUESTS = 0.3
"""The chance that a survivor takes a guest although a machine could come."""


class Clock:
    """Freezes and thaws participants, and passes deadlines when none of them has anything to do."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._thaws: list[tuple[int, Worker | Machine]] = []  # with the tick at which each thaws

    # -------------------------------------------------------------------------------------- frozen machines

    def freeze(self, machine: Machine, ticks: Sequence[int] = (20, 100, 400, 1000)) -> None:
        """Freeze a machine for one of these numbers of ticks."""
        machine.frozen = True
        for worker in machine.processes:
            worker.frozen = True
        self._thaws.append((self._cluster.ticks + self._cluster.rng.choice(ticks), machine))
        self._cluster.membership_changed()

    def freeze_worker(self, worker: Worker) -> None:
        """Freeze one worker for a while."""
        worker.frozen = True
        self._thaws.append((self._cluster.ticks + self._cluster.rng.choice((20, 100, 400)), worker))

    def freezes_before_write(self, host: Host, event: ev.Event) -> bool:
        """Whether a machine freezes between its worker's decision to write an event and the write."""
        cluster = self._cluster
        if not cluster.fault_timing.budget or host.frozen:
            return False
        if cluster.rng.random() > _FREEZE_RATES.get(type(event), 0.03):
            return False
        machine = cluster.machine_named(host.name)
        cluster.fault_timing.budget -= 1
        cluster.excuses.struck = True
        cluster.seen["froze before a write"] += 1
        self.freeze(machine, (400, 1000))
        cluster.note(f"{machine} freezes before it writes")
        return True

    def thaw_due(self) -> bool:
        """Thaw what is due first, if its time has come."""
        if not self._thaws or self._thaws[0][0] > self._cluster.ticks:
            return False
        self._thaw_first()
        return True

    def hasten_thaw(self, chance: float) -> None:
        """With this chance, something frozen thaws within a few ticks."""
        rng = self._cluster.rng
        if self._thaws and rng.random() < chance:
            _, frozen = self._thaws.pop(self._next_to_thaw())
            self._thaws.insert(0, (self._cluster.ticks + rng.choice((1, 4, 10, 30)), frozen))

    def _next_to_thaw(self) -> int:
        """Preferably a machine with an event to write, which is late then."""
        with_events = (
            i
            for i, (_, frozen) in enumerate(self._thaws)
            if isinstance(frozen, Machine) and frozen.has_unwritten_events
        )
        return next(with_events, 0)

    def _thaw_first(self) -> None:
        cluster = self._cluster
        _, frozen = self._thaws.pop(0)
        cluster.note(f"{frozen} thaws")
        frozen.frozen = False
        cluster.seen["thawed"] += 1
        cluster.membership_changed()
        if isinstance(frozen, Machine) and frozen.alive and cluster.rng.random() < 0.2:
            frozen.wake_up()
        for worker in [*frozen.processes] if isinstance(frozen, Machine) else [frozen]:
            self._thaw_worker(worker)

    def _thaw_worker(self, worker: Worker) -> None:
        worker.frozen = False
        if worker.alive and worker.unwritten_event is not None:
            event, worker.unwritten_event = worker.unwritten_event, None
            worker.append(event)
        if not worker.alive or worker.frozen or self._cluster.rng.random() >= 0.7:
            return
        # It continues where it was, before it reads any news.
        if worker.mode == Mode.CONFIRM:
            worker.report_communication_failure()
        else:
            worker.act()

    # ---------------------------------------------------------------------------------------- deadlines

    def time_out(self, worker: Worker) -> None:
        """A worker's deadline for the answers of a phase passes."""
        view = worker.view
        self._cluster.seen[f"timed out while {view.phase}"] += 1
        reason = f"no answer while {view.phase}"
        worker.append(
            ev.DeadlinePassed(
                generation=view.generation, phase=view.phase, machines=view.missing(), reason=reason
            )
        )

    def pass_deadline(self) -> bool:
        """No participant has anything to do: some deadline passes. False if there is none."""
        cluster = self._cluster
        agents = [m for m in cluster.machines if m.alive and not m.frozen]
        cluster.rng.shuffle(agents)
        if any(agent.miss_heartbeats() for agent in agents):
            return True
        workers = [w for w in cluster.workers if not w.frozen]
        cluster.rng.shuffle(workers)
        if self._pass_workers_deadline(workers) or self._pass_change_deadline(agents, workers):
            return True
        if self._thaws:
            self._thaw_first()
            return True
        return self._replace_missing(agents)

    def _pass_workers_deadline(self, workers: Sequence[Worker]) -> bool:
        """The deadlines of workers, in the order in which they pass."""
        for worker in workers:
            if worker.mode == Mode.CONFIRM:
                worker.report_communication_failure()
                return True
        if any(map(self._pass_forming_deadline, workers)):
            return True
        for worker in workers:
            if worker.mode == Mode.FINISHING and worker.view.all_finished:
                worker.complete()
                return True
        for worker in workers:
            if worker.mode == Mode.RECOVER and worker.view.missing():
                self.time_out(worker)
                return True
        for worker in workers:
            if worker.mode == Mode.HELP:  # an operation of its group takes too long
                worker.fail_communication()
                return True
        return False

    def _pass_change_deadline(self, agents: Sequence[Machine], workers: Sequence[Worker]) -> bool:
        """All have waited for the next world too long: an agent that has its workers, or who has stopped."""
        return self.give_up_change([*agents, *(w for w in workers if w.mode == Mode.STOPPED)])

    def give_up_change(self, participants: Sequence[Machine | Worker]) -> bool:
        """One of them has waited for too long. False if none of them waits."""
        for participant in participants:
            change = participant.view.worlds.change
            if change is None or (isinstance(participant, Machine) and participant.next_world is None):
                continue
            who = "an agent" if isinstance(participant, Machine) else "a worker that had stopped"
            self._cluster.seen[f"given up by {who}"] += 1
            participant.append(ev.ChangeGivenUp(world=change.world.number, reason="it takes too long"))
            return True
        return False

    def _pass_forming_deadline(self, worker: Worker) -> bool:
        """The deadline of a worker that waits until its group is formed."""
        connecting = worker.mode in (Mode.GATHER, Mode.MOVE)
        if connecting and worker.group and worker.rank in worker.group.joined:
            worker.fail_communication()
        elif worker.mode == Mode.JOIN:
            worker.active_generation, worker.joining_generation = worker.joining_generation, None
            worker.fail_communication()
        elif worker.mode == Mode.SESSIONLESS and worker.joining_generation is not None:
            worker.exit(1)
        else:
            return False
        return True

    def _replace_missing(self, agents: Sequence[Machine]) -> bool:
        """A machine comes, or a survivor takes a guest, or the agents close the job because none does."""
        cluster = self._cluster
        if cluster.states[-1].phase != Phase.FORMING and agents:
            return False
        smaller = next((agent for agent in agents if answer_of(agent.view).machines), None)
        if smaller is not None and (not cluster.supply or cluster.rng.random() < _SMALLER):
            view = smaller.view
            answer, world = answer_of(view), view.worlds.planned + 1
            plan = ""
            if answer.pipelines:
                plan = plan_after_loss(answer.pipelines, sizes_of(view), unlike=takes_unlike(view)).to_text()
            smaller.append(ev.ChangePlanned(world=world, machines=answer.machines, plan=plan))
            return True
        guests = [(agent, slot) for agent in agents for slot in guests_wanted(agent.view).get(agent.name, ())]
        if guests and (not cluster.supply or cluster.rng.random() < _GUESTS):
            cluster.add_guest(*guests[0])
            return True
        if cluster.supply:
            cluster.supply -= 1
            cluster.add_machine()
            return True
        if agents:
            agents[0].append(ev.JobClosed(reason="no machine came"))
            return True
        return False

    def revive(self) -> bool:
        """All machines are gone or frozen: one thaws, or a new one comes. False if neither can happen."""
        if self._thaws:
            self._thaw_first()
            return True
        if self._cluster.states[-1].phase == Phase.ENDED or not self._cluster.supply:
            return False
        self._cluster.supply -= 1
        self._cluster.add_machine()
        return True
