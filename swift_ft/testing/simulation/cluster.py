"""The machines and workers of a simulated job."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from swift_ft.testing.simulation.fault_timing import Excuses, FaultTiming
from swift_ft.testing.simulation.machine import Machine
from swift_ft.testing.simulation.store import Logged
from swift_ft.testing.simulation.worker import Worker
from swift_ft.testing.simulation.world import World


class Cluster(World):
    """A world with machines and workers in it.

    Args:
        seed: decides everything.
        machines: slots.
        workers: per machine.
        sessionless: the script has no session.
        trace: called with each line of the run's journal, if given.

    Attributes:
        patience: how often the first fault waits until all workers train.
        machines: all machines that ever joined.
        workers: those that are alive.
        supply: machines that can still come.
        fault_timing: when faults strike.
        excuses: what excuses an end without success.
    """

    patience = 0.4

    def __init__(
        self,
        seed: int,
        machines: int,
        workers: int,
        *,
        sessionless: bool = False,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(seed, machines, workers, sessionless=sessionless, trace=trace)
        self.machines: list[Machine] = []
        self.workers: list[Worker] = []
        self.fault_timing = FaultTiming(self.rng, self.patience)
        self.supply = 40 if self.rng.random() < 0.9 else self.rng.randint(0, 2)
        self.excuses = Excuses()
        self._machines_by_base: dict[str, Machine] = {}
        self._numbers = itertools.count()
        self._candidates: list[Worker | Machine] = []
        self._candidates_outdated = True

    def make_worker(self, machine: Machine, rank: int, started_in: int) -> Worker:
        """Start a worker of this kind of job."""
        return Worker(self, machine, rank, started_in)

    def add_machine(self) -> None:
        """A new machine offers itself."""
        self._add(Machine(self, f"m{next(self._numbers)}", self.make_worker))

    def add_guest(self, host: Machine, slot: int) -> None:
        """A machine takes a guest, for a slot."""
        guest = Machine(self, f"m{next(self._numbers)}", self.make_worker, host=host.name, slot=slot)
        host.guests.append(guest)
        self.seen["a guest"] += 1
        self._add(guest)

    def _add(self, machine: Machine) -> None:
        self.machines.append(machine)
        self._machines_by_base[machine.base] = machine
        self.membership_changed()
        machine.join()

    def machine_named(self, name: str) -> Machine:
        """The machine that has, or had, a name."""
        return self._machines_by_base[name.split(".")[0]]

    def membership_changed(self) -> None:
        """Who can act must be determined again."""
        self._candidates_outdated = True

    def candidates(self) -> Sequence[Worker | Machine]:
        """The participants that can act. Workers are in it three times: they have more to do."""
        if self._candidates_outdated:
            machines = [m for m in self.machines if m.alive]
            self.workers = [w for m in machines for w in m.workers if w.alive]
            self._candidates = [m for m in machines if not m.frozen]
            self._candidates += 3 * [w for w in self.workers if not w.frozen]
            self._candidates_outdated = False
        return self._candidates

    def provoke_fault(self, chance: float, delays: Sequence[int]) -> None:
        """A fault may strike soon, after one of these numbers of ticks, if any is left."""
        self.fault_timing.provoke(self.ticks, chance, delays)

    def logged(self, sender: int, receiver: int, iteration: int, since_generation: int) -> Logged | str:
        """What a replay can read of a sender's log, or why it cannot.

        Messages that stay inside a machine are not logged. A log that does not survive its machine can only
        be read while its writer is alive and answers.
        """
        workers = self.states[-1].shape.workers_per_machine
        if sender // workers == receiver // workers:
            return "missing"
        if not self.store.logs_survive and not self._answers(sender):
            return "away"
        return self.store.read_log(sender, iteration, since_generation)

    def _answers(self, rank: int) -> bool:
        started_in = self.states[-1].membership.started_in
        workers = (worker for machine in self.machines if machine.alive for worker in machine.workers)
        return any(
            w.rank == rank and w.alive and not w.frozen and w.started_in == started_in[w.slot]
            for w in workers
        )
