"""What time does in a simulated network that has no clock: machines freeze and thaw, deadlines pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from simulated_connection import Mode
from simulated_machine import Machine
from simulated_worker import Worker

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase

if TYPE_CHECKING:
    from simulation import Simulation

__all__ = ["Time"]

_HELD_BACK = {ev.Durable: 0.003, ev.Committed: 0.003, ev.CheckpointWanted: 0.01, ev.CannotReplay: 0.6}
"""How often an event waits in a machine that freezes, for those that are told often or seldom."""


class Time:
    """Who is frozen until when, and what happens when nobody has anything to do.

    Attributes:
        thaws: the tick at which somebody frozen goes on.
    """

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.thaws: list[tuple[int, Worker | Machine]] = []

    # -------------------------------------------------------------------------------------- frozen machines

    def freeze(self, machine: Machine, times: Sequence[int] = (20, 100, 400, 1000)) -> None:
        machine.frozen = True
        for worker in machine.workers:
            worker.frozen = True
        self.thaws.append((self.sim.ticks + self.sim.rng.choice(times), machine))
        self.sim.stale = True

    def freeze_worker(self, worker: Worker) -> None:
        worker.frozen = True
        self.thaws.append((self.sim.ticks + self.sim.rng.choice((20, 100, 400)), worker))

    def holds_back(self, worker: Worker, event: ev.Event) -> bool:
        """Whether a machine freezes between its worker's decision to write an event and the write."""
        machine = worker.machine
        if not self.sim.budget or machine.frozen or worker not in machine.workers:
            return False
        if self.sim.rng.random() > _HELD_BACK.get(type(event), 0.03):
            return False
        self.sim.budget -= 1
        self.sim.faulty = True
        self.sim.seen["held back"] += 1
        self.freeze(machine, (400, 1000))
        if self.sim.trace:
            print(f"{self.sim.ticks:5d} *** {machine} freezes before it writes")
        return True

    # ---------------------------------------------------------------------------------------- deadlines

    def time_out(self, worker: Worker) -> None:
        view = worker.view
        self.sim.seen[f"timed out while {view.phase}"] += 1
        worker.tell(ev.TimedOut(view.generation, view.phase, view.missing(), f"no answer while {view.phase}"))

    def pass_deadline(self) -> bool:
        """Nobody has anything to do: some deadline passes. False if there is none."""
        agents = [m for m in self.sim.machines if m.alive and not m.frozen]
        self.sim.rng.shuffle(agents)
        if any(agent.silence() for agent in agents):
            return True
        workers = [w for w in self.sim.running if not w.frozen]
        self.sim.rng.shuffle(workers)
        for worker in workers:
            if worker.mode == Mode.CONFIRM:
                worker.interrupt()
                return True
        for worker in workers:
            if worker.mode == Mode.GATHER and worker.group and worker.rank in worker.group.joined:
                worker.broken()
                return True
            if worker.mode == Mode.JOIN or (worker.mode == Mode.BARE and worker.joining is not None):
                if worker.mode == Mode.BARE:
                    worker.exit(1)
                    return True
                worker.running, worker.joining = worker.joining, None
                worker.broken()
                return True
        for worker in workers:
            if worker.mode == Mode.FINISHING and len(worker.view.finished) == self.sim.world:
                worker.done()
                return True
        for worker in workers:
            if worker.mode == Mode.RECOVER and worker.view.missing():
                self.time_out(worker)
                return True
        for worker in workers:
            if worker.mode == Mode.HELP:  # an operation of its group takes too long
                worker.broken()
                return True
        if self.thaws:
            self.thaw(0)
            return True
        return self._nobody_comes(agents)

    def _nobody_comes(self, agents: list[Machine]) -> bool:
        if self.sim.states[-1].phase == Phase.FORMING or not agents:
            if self.sim.supply:
                self.sim.supply -= 1
                self.sim.new_machine()
                return True
            if agents:
                agents[0].tell(ev.Closed("no machine came"))
                return True
        return False

    def revive(self) -> bool:
        """All machines are gone, or frozen: some thaw, or new ones come."""
        if self.thaws:
            self.thaw(0)
            return True
        if self.sim.states[-1].phase == Phase.ENDED or not self.sim.supply:
            return False
        self.sim.supply -= 1
        self.sim.new_machine()
        return True

    def thaw(self, index: int) -> None:
        _, frozen = self.thaws.pop(index)
        if self.sim.trace:
            print(f"{self.sim.ticks:5d} *** {frozen} thaws")
        frozen.frozen = False
        self.sim.seen["thawed"] += 1
        self.sim.stale = True
        if isinstance(frozen, Machine) and frozen.alive and self.sim.rng.random() < 0.2:
            frozen.wake_up()
        for worker in [*frozen.workers] if isinstance(frozen, Machine) else [frozen]:
            worker.frozen = False
            if worker.alive and worker.in_flight is not None:
                event, worker.in_flight = worker.in_flight, None
                worker.tell(event)
            if (
                worker.alive and not worker.frozen and self.sim.rng.random() < 0.7
            ):  # it goes on where it was, before it reads any news
                if worker.mode == Mode.CONFIRM:
                    worker.interrupt()
                else:
                    worker.act()

    def thaw_soon(self) -> None:
        """Somebody frozen goes on in a moment."""
        _, frozen = self.thaws.pop(self._next_to_thaw())
        self.thaws.insert(0, (self.sim.ticks + self.sim.rng.choice((1, 4, 10, 30)), frozen))

    def _next_to_thaw(self) -> int:
        """Rather one with something to say, which comes late then."""
        waiting = (i for i, (_, who) in enumerate(self.thaws) if isinstance(who, Machine) and who.holds_back)
        return next(waiting, 0)
