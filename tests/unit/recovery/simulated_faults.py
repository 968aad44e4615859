"""The faults of a simulated network, by name; how often each comes follows from a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from simulated_connection import Mode
from simulated_machine import Machine
from simulated_worker import Worker

from swift_ft.recovery import events as ev

if TYPE_CHECKING:
    from simulation import Simulation

__all__ = ["FAULTS", "Faults"]

FAULTS = {
    "kill_machine": 8,
    "kill_two": 2,
    "kill_neighbours": 4,
    "kill_replicas": 0,
    "kill_all": 1,
    "kill_worker": 4,
    "freeze_machine": 5,
    "freeze_worker": 2,
    "slander": 3,
    "network": 5,
    "corrupt": 3,
    "unreadable": 2,
    "diverge": 1,
    "dirty": 1,
    "timeout": 4,
    "script": 1,
    "leave": 1,
    "close": 1,
}


class Faults:
    """What can go wrong in a simulation. Each fault is a method; False if it could not happen just now."""

    def __init__(self, sim: Simulation, weights: Mapping[str, int]) -> None:
        self.sim = sim
        self._kinds, self._weights = list(weights), list(weights.values())

    def strike(self) -> None:
        """One fault of a random kind."""
        kind = self.sim.rng.choices(self._kinds, self._weights)[0]
        if self.sim.bare and kind in ("corrupt", "unreadable", "diverge", "dirty"):
            return
        phase = self.sim.states[-1].phase  # some faults change it at once
        if getattr(self, kind)():
            self.sim.budget -= 1
            self.sim.faulty = True
            self.sim.seen[f"fault: {kind} while {phase}"] += 1
            if self.sim.trace:
                print(f"{self.sim.ticks:5d} *** {kind}")

    def _some_machine(self) -> Machine | None:
        up = [m for m in self.sim.machines if m.alive and not m.frozen]
        state = self.sim.states[-1]
        members = [m for m in up if m.name in state.members]
        awaited = [m for m in up if m.name in state.missing()]
        if awaited and self.sim.rng.random() < 0.5:
            return self.sim.rng.choice(awaited)  # in the middle of what the others wait for
        return self.sim.rng.choice(members or up) if up else None

    def _some_worker(self) -> Worker | None:
        return self.sim.rng.choice(self.sim.running) if self.sim.running else None

    def kill_machine(self) -> bool:
        machine = self._some_machine()
        if machine is not None:
            machine.die()
        return machine is not None

    def kill_two(self) -> bool:
        self.kill_machine()
        return self.kill_machine()

    def kill_neighbours(self) -> bool:
        """Machines beside each other lose their power at once."""
        members = self.sim.states[-1].members
        many = min(self.sim.rng.choice((2, 2, 3)), len(members) - 1)
        first = self.sim.rng.randrange(len(members) - many + 1)
        lost = [m for m in self.sim.machines if m.alive and m.name in members[first : first + many]]
        for machine in lost:
            machine.die()
        return bool(lost)

    def kill_replicas(self) -> bool:
        """All machines with a replica of some stage lose their power at once."""
        state, held = self.sim.states[-1], {w.part: set[str]() for w in self.sim.running}
        for worker in self.sim.running:
            held[worker.part].add(worker.machine.name)
        lost = held[self.sim.rng.choice(sorted(held))] if held else set()
        many = len(lost) < len(state.members)
        for machine in self.sim.machines if many else ():
            if machine.alive and machine.name in lost:
                machine.die()
        return bool(lost) and many

    def kill_all(self) -> bool:
        if self.sim.rng.random() > 0.2:
            return False
        for machine in self.sim.machines:
            if machine.alive:
                machine.die()
        return True

    def kill_worker(self) -> bool:
        worker = self._some_worker()
        if worker is not None:
            worker.exit(-9)
        return worker is not None

    def freeze_machine(self) -> bool:
        machine = self._some_machine()
        if machine is not None:
            self.sim.time.freeze(machine)
        return machine is not None

    def freeze_worker(self) -> bool:
        worker = self._some_worker()
        if worker is not None:
            self.sim.time.freeze_worker(worker)
        self.sim.stale = True
        return worker is not None

    def slander(self) -> bool:
        """A healthy machine is declared lost: the network between two agents failed."""
        machine = self._some_machine()
        if machine is not None:
            self.sim.append(ev.Lost(machine.name, "slander"), "its watcher")
        return machine is not None

    def network(self) -> bool:
        groups = [w.group for w in self.sim.running if w.group is not None]
        for group in groups:
            group.broken = True
        return bool(groups)

    def corrupt(self) -> bool:
        """Part of a log is torn or flipped."""
        found = [(rank, i) for rank, log in self.sim.store.logs.items() for i in log]
        if not found:
            return False
        self.sim.store.corrupt.update(self.sim.rng.sample(found, min(len(found), self.sim.rng.randint(1, 4))))
        return True

    def unreadable(self) -> bool:
        spoiled = self.sim.rng.choice((1, 1, 2, 1_000_000))
        self.sim.store.failing_loads += spoiled
        self.sim.spoiled += spoiled
        return True

    def diverge(self) -> bool:
        """A step, live or replayed, finds that it cannot be right, or cannot write its log."""
        stepping = (Mode.RUN, Mode.REPLAY)
        worker = next((w for w in self.sim.running if w.mode in stepping and not w.frozen), None)
        if worker is None:
            return False
        self.sim.spoiled += 1
        worker.abandon_step()
        worker.leave_group()
        worker.mode = Mode.RECOVER
        worker.tell(ev.CannotReplay(worker.rank, worker.log_generation, "diverged"))
        return True

    def dirty(self) -> bool:
        """Communication fails after the optimizer's step: the state is between two iterations."""
        return any(worker.break_half_updated() for worker in self.sim.running)

    def timeout(self) -> bool:
        """A deadline was too short."""
        waiting = [w for w in self.sim.running if w.mode == Mode.RECOVER and w.view.missing()]
        if waiting:
            self.sim.time.time_out(self.sim.rng.choice(waiting))
        return bool(waiting)

    def script(self) -> bool:
        worker = self._some_worker()
        if worker is None:
            return False
        self.sim.may_fail = True
        if self.sim.rng.random() < 0.1:
            worker.machine.usage_failure = True
        worker.exit(1)
        return True

    def leave(self) -> bool:
        """One rank's script leaves the loop before the others."""
        worker = self._some_worker()
        if worker is None or worker.mode != Mode.RUN or len(worker.machine.workers) > 1:
            return False
        self.sim.may_fail = self.sim.left_alone = True
        worker.exit(0)
        return True

    def close(self) -> bool:
        if self.sim.rng.random() < 0.1:
            self.sim.may_fail = True
            self.sim.append(ev.Closed("Ctrl-C", 130), "user")
        return True
