"""The machines and workers of a simulated job."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
        """Have :meth:`candidates` determine again who can act."""
        self._candidates_outdated = True

    def candidates(self) -> Sequence[Worker | Machine]:
        """The participants that can act. Workers are in it three times: they have more to do."""
        if self._candidates_outdated:
            machines = [m for m in self.machines if m.alive]
            self.workers = [w for m in machines for w in m.processes if w.alive]
            self._candidates = [m for m in machines if not m.frozen]
            self._candidates += 3 * [w for w in self.workers if not w.frozen]
            self._candidates_outdated = False
        return self._candidates

    def provoke_fault(self, chance: float, delays: Sequence[int]) -> None:
        """A fault may strike soon, after one of these numbers of ticks, if any is left."""
        self.fault_timing.provoke(self.ticks, chance, delays)

    def logged(self, sender: int, receiver: int, iteration: int, since_generation: int) -> Logged | str:
        """The messages that a replay can read of a sender's log, or the reason why it cannot.

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
            w.rank == rank and w.alive and not w.frozen and w.started_in == started_in.get(w.slot)
            for w in workers
        )


class FaultTiming:
    """The number of faults, and their times.

    Args:
        rng: the run's random numbers.
        patience: how often the first fault waits until all workers train.

    Attributes:
        budget: faults left.
    """

    def __init__(self, rng: random.Random, patience: float) -> None:
        self.budget = rng.choice((0, 1, 2, 2, 3, 4, 5, 7))
        self._rng = rng
        self._waits_until_live = rng.random() < patience
        self._quiet_until = (
            sys.maxsize if self._waits_until_live else rng.choice((0, 100, 150, 200, 300, 400))
        )
        self._rate = rng.choice((0.002, 0.005, 0.03))
        self._provoked_at = -1

    def is_due(self, tick: int) -> bool:
        """Whether a fault strikes now."""
        if not self.budget or tick <= self._quiet_until:
            return False
        return tick == self._provoked_at or self._rng.random() < self._rate

    def provoke(self, tick: int, chance: float, delays: Sequence[int]) -> None:
        """A fault may strike soon, after one of these numbers of ticks, if any is left."""
        if self.budget and self._rng.random() < chance:
            self._provoked_at = tick + self._rng.choice(delays)

    def job_is_live(self, tick: int) -> None:
        """All workers train. The first fault that waited for this may come."""
        if self._waits_until_live:
            self._waits_until_live = False
            self._quiet_until = tick + self._rng.choice((0, 50, 50, 100, 150, 200))


@dataclass(slots=True)
class Excuses:
    """The excuses of a job that ends without success.

    Attributes:
        may_fail: a fault struck after which the job may end in any way.
        struck: any fault struck.
        left_early: a script left the loop before the others.
        damaged: a committed checkpoint is not what was saved.
    """

    may_fail: bool = False
    struck: bool = False
    left_early: bool = False
    damaged: bool = False

    def cover(self, reason: str, supply: int) -> bool:
        """Whether a job may end for this reason, with so many machines left to replace lost ones."""
        if self.may_fail or (reason in ("abandoned", "no machine came") and not supply):
            return True
        if "no intact checkpoint is left" in reason and self.damaged:
            return True
        limits = ("way back is left", "more than the limit", "after the last iteration", "this run is left")
        return self.struck and any(limit in reason for limit in limits)
