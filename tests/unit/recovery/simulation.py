"""A simulated network that drives the recovery protocol through seeded failure orders.

Machines, workers and a journal, without sockets, threads or a clock. Everybody has read the journal up to a
place of its own and acts on what it has read, at random times. Faults are drawn from the same seed. Whatever
must never happen raises :class:`Violation` with the seed.

Run one seed again, and see its journal:

    python tests/unit/recovery/simulation.py 4711 --shape 4x1
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script: the modules beside this one are the same as for pytest
    sys.path.insert(0, str(Path(__file__).parent))

from simulated_command import main, run_seed
from simulated_faults import FAULTS, Faults
from simulated_machine import Machine
from simulated_promises import check_contents, check_plan, check_step, check_wish, replays_of
from simulated_store import GENESIS, Content, Group, Logged, SharedStore, Violation, advance
from simulated_time import Time
from simulated_worker import Worker

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import Plan
from swift_ft.recovery.protocol import MAX_FAILED_FALLBACKS, step

__all__ = ["Outcome", "Simulation", "Violation", "simulate"]

MAX_TICKS = 30_000
"""Runs take a few hundred; one that takes so many does not get on."""

_ENOUGH_IDLE = 30
"""Picks without anything to do, in a row, before it is looked whether a deadline has to pass."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, and what happened in it."""

    ok: bool
    reason: str
    events: int
    ticks: int
    seen: Counter[str]


class Simulation:
    """One run.

    Args:
        seed: decides everything.
        machines: slots.
        workers: per machine.
        bare: the script has no session.
        trace: print each event.
        worker_class: what a worker does.
        faults: how often each comes.

    Attributes:
        patience: how often the first fault waits until everybody is at work.
        parts: in how many a replay can be split; with more than one, survivors help.
    """

    patience = 0.4
    parts = 1

    def __init__(
        self,
        seed: int,
        machines: int,
        workers: int = 1,
        *,
        bare: bool = False,
        trace: bool = False,
        worker_class: type[Worker] = Worker,
        faults: Mapping[str, int] = FAULTS,
    ) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.events: list[ev.Event] = []
        self.states = [State()]
        self.trace = trace
        self.ticks = 0
        self.bare = bare
        self.world = machines * workers
        self.iterations = rng.randint(3, 9)
        self.checkpoint_every = rng.choice((1, 1, 2, 3, 4, 9))
        self.keep = rng.randint(1, 2)
        self.background_rate = rng.choice((0.4, 0.4, 0.04))
        self.ask_rate = rng.choice((0.0, 0.0, 0.1, 0.5))
        self._news_rate = rng.choice((1.0, 1.0, 0.1))
        self.worker_class = worker_class
        self.store = self.make_store()
        self.store.logs_outlive = seed % 5 == 1
        self.on_device = seed % 5 == 2  # where memory is too dear to keep what stays inside a machine
        self.resume = rng.randint(1, 2) * self.checkpoint_every if rng.random() < 0.2 and not bare else None
        self.claimed = False
        self.shapes_known = False
        self.results: dict[int, Content] = {}
        self._groups: dict[tuple[int, bool], Group] = {}
        self._checked_groups: set[int] = set()
        self._names = itertools.count()
        self.machines: list[Machine] = []
        self._by_base: dict[str, Machine] = {}
        self.running: list[Worker] = []
        self._picks: list[Worker | Machine] = []
        self.stale = True
        self.time = Time(self)
        self.budget = rng.choice((0, 1, 2, 2, 3, 4, 5, 7))
        self._patient = rng.random() < self.patience
        self._quiet_until = MAX_TICKS if self._patient else rng.choice((0, 100, 150, 200, 300, 400))
        self._fault_rate = rng.choice((0.002, 0.005, 0.03))
        self._fuse = -1
        self._faults = Faults(self, faults)
        self.supply = 40 if rng.random() < 0.9 else rng.randint(0, 2)
        self.may_fail = False  # a fault happened that entitles to an end without success
        self.faulty = False
        self.left_alone = False
        self.spoiled = 0  # ways back that a fault made impossible
        self._restarts = rng.choice((0, 0, 1, 2))
        self._max_failures = rng.randint(0, 3) if rng.random() < 0.1 else None
        if self.resume is not None:
            self._earlier_run(self.resume)
        opened = ev.Opened(machines, workers, self._restarts, self._max_failures)
        self.append(opened, "simulation")
        for _ in range(machines + rng.choice((0, 0, 1, 2))):
            self.new_machine()

    # ------------------------------------------------------------------------------------- participants

    def make_store(self) -> SharedStore:
        return SharedStore()

    def new_machine(self) -> None:
        machine = Machine(self, f"m{next(self._names)}")
        self.machines.append(machine)
        self._by_base[machine.base] = machine
        self.machines_changed()
        machine.join()

    def machine_named(self, name: str) -> Machine:
        return self._by_base[name.split(".")[0]]

    def machines_changed(self) -> None:
        self.stale = True

    def workers_changed(self) -> None:
        self.stale = True

    def group(self, generation: int, *, replay: bool = False) -> Group:
        """The group of a generation, or the one in which portions of it replay."""
        return self._groups.setdefault((generation, replay), Group())

    def logged(self, sender: int, receiver: int, iteration: int, since_generation: int) -> Logged | str:
        """A sender's log of an iteration: messages that stay inside a machine are not in it.

        One that does not outlive its machine is had from its writer only, while that lives and answers.
        """
        workers = self.states[-1].workers
        if sender // workers == receiver // workers:
            return "missing"
        if not self.store.logs_outlive and not self._answers(sender):
            return "away"
        return self.store.read_log(sender, iteration, since_generation)

    def _answers(self, rank: int) -> bool:
        launched = self.states[-1].launched
        workers = (worker for machine in self.machines if machine.alive for worker in machine.workers)
        return any(
            w.rank == rank and w.alive and not w.frozen and w.launched == launched[w.slot] for w in workers
        )

    def _earlier_run(self, iterations: int) -> None:
        """The store holds a committed checkpoint of a run before this one."""
        content = self._content_after(iterations)
        paths = {rank: f"{iterations}/rank-{rank}.earlier" for rank in range(self.world)}
        self.store.parts.update(dict.fromkeys(paths.values(), content))
        self.store.commit(iterations, paths, self.world)
        self.iterations = max(self.iterations, iterations + 2)

    def _content_after(self, iterations: int) -> Any:
        content = GENESIS
        for i in range(iterations):
            content = advance(content, i, -1)
        return content

    # ------------------------------------------------------------------------------------- the journal

    def append(self, event: ev.Event, by: str) -> int:
        """Write an event; returns the position behind it."""
        before = self.states[-1]
        after = step(before, event)
        self.events.append(event)
        self.states.append(after)
        if self.trace:
            self._print(event, by, before, after)
        if getattr(event, "generation", before.generation) < before.generation:
            self.seen[f"late {type(event).__name__} while {before.phase}"] += 1
        if after is not before:
            if isinstance(event, ev.Bare) and self.shapes_known:
                raise Violation("states are given up for a script that has sessions")
            self._check(before, after)
            if after.phase != before.phase or after.generation != before.generation:
                self._phase_changed(before, after)
        else:
            self.seen[f"no news: {type(event).__name__}"] += 1
        return len(self.events)

    def _phase_changed(self, before: State, after: State) -> None:
        if self._patient and after.phase == Phase.LIVE:
            self._patient = False
            self._quiet_until = self.ticks + self.rng.choice((0, 50, 50, 100, 150, 200))
        if after.phase == Phase.RECOVERING:  # short and full of events: the rarest place for a fault
            self.tempt(0.8, (1, 2, 4, 10, 20, 40))
        else:
            self.tempt(0.4 if after.generation > 1 else 0.1, (1, 4, 10, 20, 40))
        if self.time.thaws and self.rng.random() < (0.9 if after.phase == Phase.RECOVERING else 0.1):
            self.time.thaw_soon()
        if after.plan is not None and before.plan is None:
            self.seen[f"way: {after.plan.way}"] += 1
            self._check_plan(after, after.plan)

    def tempt(self, chance: float, delays: Sequence[int]) -> None:
        """A fault may come soon, if any is left."""
        if self.budget and self.rng.random() < chance:
            self._fuse = self.ticks + self.rng.choice(delays)

    def _print(self, event: ev.Event, by: str, before: State, after: State) -> None:
        print(f"{self.ticks:5d} {by:60s} {event}{'' if after is not before else '   (no news)'}")
        if after.phase != before.phase or after.generation != before.generation:
            plan = f" {after.plan}" if after.plan is not None and before.plan is None else ""
            print(f"{'':6s}--> {after.phase} generation {after.generation} epoch {after.epoch} "
                  f"members {after.members} committed {after.committed}{plan}")  # fmt: skip

    # ---------------------------------------------------------------------------------------- invariants

    def _check(self, before: State, after: State) -> None:
        """What the state machine promises, whatever comes in."""
        check_step(before, after, self.events[-1])
        check_wish(before, after, self.events[-1], self.running)
        if after.committed not in (None, before.committed) and after.committed % self.checkpoint_every:
            self.seen["early checkpoint committed"] += 1

    def _check_plan(self, state: State, plan: Plan) -> None:
        check_plan(state, plan, resumed=self.resume is not None)
        self.seen.update(replays_of(state, plan))

    def check_formed(self, generation: int, plan: Plan) -> None:
        """When a group is formed: all states are of one history, before anybody takes a step."""
        if generation in self._checked_groups:
            return
        self._checked_groups.add(generation)
        group = [w for w in self.running if generation in (w.running, w.joining)]
        if len(group) != self.world or len({w.rank for w in group}) != self.world:
            raise Violation(f"the group of generation {generation} is {group}")
        self._check_contents(generation, plan, group)
        self.seen["formed"] += 1

    def _check_contents(self, generation: int, plan: Plan, group: list[Worker]) -> None:
        check_contents(generation, plan, group)

    # -------------------------------------------------------------------------------------------- running

    def _refresh(self) -> None:
        machines = [m for m in self.machines if m.alive]
        self.running = [w for m in machines for w in m.workers if w.alive]
        self._picks = [m for m in machines if not m.frozen]
        self._picks += 3 * [w for w in self.running if not w.frozen]
        self.stale = False

    def run(self) -> Outcome:
        """Let everybody act until nobody is left.

        Raises:
            Violation: when something happens that must not.
        """
        rng, idle = self.rng, 0
        while True:
            self.ticks += 1
            if self.ticks > MAX_TICKS:
                raise Violation(f"no end after {MAX_TICKS} ticks in phase {self.states[-1].phase}")
            if self.stale:
                self._refresh()
            if (
                self.budget
                and self.ticks > self._quiet_until
                and (self.ticks == self._fuse or rng.random() < self._fault_rate)
            ):
                self._faults.strike()
                continue
            if self.time.thaws and self.time.thaws[0][0] <= self.ticks:
                self.time.thaw(0)
                continue
            if not self._picks:
                if not self.time.revive():
                    break
                continue
            who = self._picks[int(rng.random() * len(self._picks))]
            idle = 0 if self._let_act(who) else idle + 1
            if idle > _ENOUGH_IDLE and not self._anybody():
                idle = 0
                if not self.time.pass_deadline():
                    raise Violation(f"stuck in phase {self.states[-1].phase}: {self.running}")
        return self._outcome()

    def _let_act(self, who: Worker | Machine) -> bool:
        """Let a participant read some of the journal, and act a little."""
        rng, end = self.rng, len(self.events)
        behind = end - who.position
        read = 0
        if behind and rng.random() < self._news_rate:
            chance = rng.random()
            if chance < 0.5:
                read = behind
            elif chance < 0.8:
                read = int(rng.random() * (behind + 1))
            if read:
                who.read(who.position + read)
        if isinstance(who, Machine):
            return (who.alive and who.act()) or read > 0
        acted = False
        for _ in range(1 + int(rng.random() * 4)):
            if not who.alive or who.frozen or not who.act():
                break
            acted = True
        return acted or read > 0

    def _anybody(self) -> bool:
        """Whether anybody has anything to do, once all have read everything."""
        acted = False
        for who in [*self.machines, *self.running]:
            if who.alive and not who.frozen:
                if who.position < len(self.events):
                    who.read(len(self.events))
                    acted = True
                acted = (who.alive and who.act()) or acted
        return acted

    def _outcome(self) -> Outcome:
        state = self.states[-1]
        verdict = state.verdict
        ok = verdict is not None and verdict.ok
        reason = "abandoned" if verdict is None else verdict.reason
        if self.bare:
            self.may_fail = True
        if not ok and not self._excused(reason):
            raise Violation(f"ended without success, and without a good reason: {reason}")
        if ok and not self.bare:
            contents = set(self.results.values())
            complete = len(self.results) == self.world or self.left_alone
            if not complete or len(contents) > 1:
                raise Violation(f"finished with different states: {self.results}")
            if any(content.iteration != self.iterations for content in contents):
                raise Violation(f"finished at another iteration than {self.iterations}: {self.results}")
        self.seen["finished" if ok else "gave up"] += 1
        return Outcome(ok, reason, len(self.events), self.ticks, self.seen)

    def _excused(self, reason: str) -> bool:
        """Whether there was a reason to give up."""
        scarce = reason in ("abandoned", "no machine came") and not self.supply
        limits = ("communication broke", "more than the limit", "lost after the last iteration")
        spoiled = "ways back in a row failed" in reason and self.spoiled > MAX_FAILED_FALLBACKS
        return (
            self.may_fail or scarce or spoiled or (self.faulty and any(limit in reason for limit in limits))
        )


def simulate(
    seed: int, machines: int, workers: int = 1, *, bare: bool = False, trace: bool = False
) -> Outcome:
    """Run one seed.

    Raises:
        Violation: with the command that runs this seed again.
    """
    sim = Simulation(seed, machines, workers, bare=bare, trace=trace)
    command = f"python {Path(__file__)} {seed} --shape {machines}x{workers}{' --bare' if bare else ''}"
    return run_seed(sim, command)


if __name__ == "__main__":
    main(simulate)
