"""A machine of the simulated network: an agent, its workers, and the sentinel that watches a neighbour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulated_connection import Mode
from simulated_process import FENCED
from simulated_worker import Worker

from swift_ft.launch.sentinel import neighbour_of
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import AgentTodo, agent_order

if TYPE_CHECKING:
    from simulation import Simulation

__all__ = ["Machine"]


class Machine:
    """One launcher agent with its workers. It knows the journal up to ``position`` only."""

    def __init__(self, sim: Simulation, base: str) -> None:
        self.sim = sim
        self.base = base
        self.incarnation = 0
        self.name = f"{base}.0"
        self.position = len(sim.events)
        self.workers: list[Worker] = []
        self.launched: int | None = None
        self.told_bare = 0
        self.told_lost: set[str] = set()
        self.alive = True  # its agent's process
        self.frozen = False
        self.usage_failure = False

    def __repr__(self) -> str:
        return f"agent {self.name}"

    @property
    def holds_back(self) -> bool:
        """Whether a worker has decided to write something, and could not yet."""
        return any(worker.in_flight is not None for worker in self.workers)

    @property
    def view(self) -> State:
        """The state as far as this agent has read."""
        return self.sim.states[self.position]

    def tell(self, event: ev.Event) -> None:
        """Agents do not wait until they have read what they wrote."""
        self.sim.append(event, repr(self))

    def read(self, until: int) -> None:
        self.position = until

    def join(self) -> None:
        self.tell(ev.Joined(self.name, None, f"{self.base}:1"))

    def die(self) -> None:
        """The machine loses its power."""
        self.alive = False
        self.stop_workers()
        self.sim.machines_changed()

    def stop_workers(self) -> None:
        for worker in self.workers:
            if worker.alive:
                worker.exit(-9)
        self.workers = []
        self.sim.workers_changed()

    # ----------------------------------------------------------------------------------- one small step

    def act(self) -> bool:
        """Do a little. False if there was nothing to do."""
        steps = [self._watch, self._news, self._obey]
        self.sim.rng.shuffle(steps)
        done = [step() for step in steps if self.alive]
        return any(done)

    def _watch(self) -> bool:
        """A killed agent's connection ends at once; a frozen one is found by the deadline alone."""
        state = self.view
        machine = neighbour_of(self.name, dict(state.addresses))
        if machine is None or machine in self.told_lost or state.phase == Phase.ENDED:
            return False
        if self.sim.machine_named(machine).alive:
            return False
        self.told_lost.add(machine)
        self.tell(ev.Lost(machine, "its agent's connection ended", self.name))
        return True

    def wake_up(self) -> None:
        """It slept, and takes its neighbour for silent."""
        machine = neighbour_of(self.name, dict(self.view.addresses))
        if machine is not None:
            self.tell(ev.Lost(machine, "its agent was silent", self.name))

    def silence(self) -> bool:
        """The deadlines for heartbeats passed."""
        machine = neighbour_of(self.name, dict(self.view.addresses))
        if machine is not None and machine not in self.told_lost and self.sim.machine_named(machine).frozen:
            self.told_lost.add(machine)
            self.tell(ev.Lost(machine, "its agent was silent", self.name))
            return True
        for worker in self.workers:
            if worker.alive and worker.frozen:
                worker.exit(-9)
                return True
        return False

    def _news(self) -> bool:
        """Workers that ended."""
        ended = [w for w in self.workers if not w.alive]
        if not ended:
            return False
        codes = [w.exit_code for w in self.workers]
        if not any(codes):
            if len(ended) < len(self.workers):
                return False
            self.tell(ev.Exited(self.name, self.launched or 0))
            self.workers = []
            return True
        worker = next(w for w in ended if w.exit_code)
        self.workers.remove(worker)
        assert worker.exit_code is not None
        if worker.exit_code == FENCED:
            return True  # it read in the journal that it is replaced: no news
        if worker.exit_code < 0:
            self.tell(ev.Lost(self.name, f"worker {worker.rank} ended with {worker.exit_code}"))
        else:
            reason = f"worker {worker.rank} raised"
            self.tell(ev.Failed(self.name, self.launched or 0, reason, worker.exit_code, self.usage_failure))
        return True

    def _obey(self) -> bool:
        state = self.view
        order = agent_order(state, machine=self.name, launched=self.launched)
        match order.todo:
            case AgentTodo.STOP:
                self.die()
            case AgentTodo.REJOIN:
                self.stop_workers()
                self.incarnation += 1
                self.name = f"{self.base}.{self.incarnation}"
                self.launched = None
                self.told_lost.clear()  # under the old name nobody listened
                self.sim.machines_changed()
                self.join()
            case AgentTodo.LAUNCH:
                assert order.slot is not None
                self.stop_workers()
                self.launched, self.told_bare = order.generation, 0
                ranks = state.ranks_of(order.slot)
                self.sim.store.replace_machine(ranks)
                self.workers = [self.sim.worker_class(self.sim, self, rank, self.launched) for rank in ranks]
                self.sim.workers_changed()
            case AgentTodo.WAIT:
                return self._tell_bare(state)
        return True

    def _tell_bare(self, state: State) -> bool:
        outdated = self.launched is not None and self.launched < state.generation
        bare = not self.workers or any(w.mode in (Mode.BOOT, Mode.BARE) for w in self.workers)
        if state.phase != Phase.AGREEING or not outdated or not bare or self.told_bare >= state.generation:
            return False
        self.told_bare = state.generation
        self.tell(ev.Bare(self.name, state.generation))
        return True
