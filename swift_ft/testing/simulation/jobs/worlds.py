"""Simulated jobs that change to other worlds while they train, and while machines are lost.

Operators plan worlds with more or fewer machines, or with the same in other slots, also some that cannot be.
Workers of the next world are processes of their own: the real core of a worker, beside those that train.
"""

from __future__ import annotations

from collections.abc import Callable

from swift_ft.config.run_plan import plan_from_json
from swift_ft.costs.survivors_plan import plan_after_loss
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.next_pipelines import Sizes, takes_unlike
from swift_ft.recovery.regrowth import growth_of
from swift_ft.recovery.worlds import Change
from swift_ft.testing.simulation.faults import FAULTS
from swift_ft.testing.simulation.job import SimulatedJob
from swift_ft.testing.simulation.jobs.memory import FAULTS_OF_COPIES, MemoryJob
from swift_ft.testing.simulation.jobs.pipelines import FAULTS_OF_PIPELINES, PipelinesJob
from swift_ft.testing.simulation.jobs.replicated import FAULTS_OF_REPLICAS, ReplicatedJob
from swift_ft.testing.simulation.store import Content, Violation

_PLANS = 0.02
"""The chance in each step of the simulation that an operator plans another world, while all train."""
_TWO_AT_ONCE = 0.1
_COMES = 0.03
"""The chance that a machine comes for a lost one, and that worker 0 looks whether one has."""
_GROWS = 0.3
_AGES = 6_000
"""Steps of the simulation after which a change must have come about, or be given up."""
_AT_EVENTS = (1, 1, 2, 3, 5, 8)
_OF_CHANGES = {"give_up_change_early": 3, "kill_next": 5}


class _Operators(SimulatedJob):
    """Plans other worlds, and checks what comes of them."""

    patience = 0.7
    _planned_at = 0

    def _begin(self) -> None:
        self.settings.iterations += self.rng.choice((4, 8, 12))
        self._changes_left = self.rng.choice((1, 1, 2, 3))

    # ------------------------------------------------------------------------------------------- plans

    def each_tick(self) -> None:
        """Now and then an operator plans another world, or worker 0 one that makes losses good."""
        self._grow_back(self.states[-1])
        state = self.states[-1]
        if state.worlds.change is not None and self.ticks - self._planned_at > _AGES:
            raise Violation(f"a change has been under way for {_AGES} steps: {state.worlds.change}")
        if state.phase != Phase.LIVE or not self._changes_left or self.rng.random() > _PLANS:
            return
        if state.worlds.change is not None and self.rng.random() > _TWO_AT_ONCE:
            return
        if self.supply and self.rng.random() < 0.3:
            self.supply -= 1
            self.add_machine()
        self._changes_left -= 1
        machines = self._some_machines(self.states[-1])
        world = state.worlds.planned + self.rng.choice((1, 1, 1, 1, 1, 1, 2))
        self.append(ev.ChangePlanned(world=world, machines=machines), "an operator")

    def _grow_back(self, state: State) -> None:
        full = state.worlds.full
        if full is None:
            return
        if len(full.machines) <= state.shape.machines:
            raise Violation(f"{state.shape.machines} machines train, and {full} is to come back")
        if self.supply and self.rng.random() < _COMES:
            self.supply -= 1
            self.add_machine()
        growth = growth_of(self.states[-1])
        if growth is None or self.rng.random() > _GROWS:
            return
        sizes, plan = Sizes(full.layers, full.microbatches), growth.plan
        if growth.pipelines:
            plan = plan_after_loss(growth.pipelines, sizes, unlike=takes_unlike(state)).to_text()
        world = state.worlds.planned + 1
        self.append(ev.ChangePlanned(world=world, machines=growth.machines, plan=plan), "worker 0")

    def _some_machines(self, state: State) -> tuple[str, ...]:
        here = [*sorted(state.membership.slots), *state.membership.waiting()]
        number = min(len(here), max(1, state.shape.machines + self.rng.choice((-1, 0, 0, 1, 1))))
        chosen = self.rng.sample(here, number)
        if self.rng.random() < 0.03:
            chosen.append(self.rng.choice(["nobody", *chosen, *sorted(state.membership.fenced)]))
        return tuple(chosen)

    # ----------------------------------------------------------------------------------------- what follows

    def state_changed(self, before: State, after: State) -> None:
        """Check what comes of changes; faults like to strike while one is under way."""
        super().state_changed(before, after)
        was, now = before.worlds, after.worlds
        if was is now:
            return
        if now.change is not None:
            self.provoke_fault(0.25, _AT_EVENTS)
        if was.change is None and now.change is not None:
            self._planned_at = self.ticks
            self.seen["a change was planned"] += 1
        elif now.present is not was.present:
            self._check_switch(before, after)
        elif was.change is not None and now.change is None:
            self.seen[f"given up with {_progress_of(before)}"] += 1

    def _check_switch(self, before: State, after: State) -> None:
        """All workers of the next world have the state that all of the present one have stopped with."""
        difference = after.shape.machines - before.shape.machines
        size = "more" if difference > 0 else "fewer" if difference else "as many"
        self.seen[f"switched to {size} machines"] += 1
        if before.worlds.full is not None and difference > 0:
            self.seen["grew back in part" if after.worlds.full is not None else "grew back"] += 1
        self.provoke_fault(0.4, _AT_EVENTS)
        number, since = after.worlds.present.number, after.worlds.present.since
        takers = [w for m in self.machines for w in m.processes if w.world_number == number]
        # One that has died since it took its state is a loss of the next world.
        there = [slot for slot, name in after.membership.members.items() if self.machine_named(name).alive]
        ranks = sorted(rank for slot in there for rank in after.ranks_of(slot))
        if sorted(w.rank for w in takers) != ranks:
            raise Violation(f"world {number} takes over with {takers}")
        gone = [w for w in takers if w.content is None or w.content.iteration != since]
        if gone:
            raise Violation(f"{gone} have not taken the state of iteration {since}")
        last = [w for w in self.workers if w.world_number == before.worlds.present.number and w.alive]
        last = [w for w in last if w.started_in == before.membership.started_in.get(w.slot)]
        change = before.worlds.change
        assert change is not None
        if change.held:  # after a loss: others may be one iteration behind
            last = [w for w in last if w.rank in change.sources]
            self.seen["switched after a loss"] += 1
            offered = {piece for rank in change.offered for piece in change.held[rank]}
            if not offered.issuperset(piece for held in change.held.values() for piece in held):
                raise Violation(f"world {number} begins with {offered}, and {change.held} were there")
        states: list[Content | None]
        if change.copies:
            self.seen["switched to copies"] += 1
            states = [self.offers[one.address].content for one in change.offered.values()]
        else:
            states = [w.content for w in last]
        at = {*states, *(w.content for w in takers)}
        if len(at) > 1:
            raise Violation(f"world {number} begins with another state than its last one had: {at}")
        if any(w.core.next is not None for w in last):
            raise Violation(f"not all of {last} have stopped")

    def _check_results(self) -> None:
        super()._check_results()
        present = self.states[-1].worlds.present.number
        left = [w for w in self.workers if w.alive and not w.frozen and w.world_number < present]
        if left := [w for w in left if not self.machine_named(w.machine.name).frozen]:
            raise Violation(f"workers of an earlier world are left: {left}")


def _progress_of(state: State) -> str:
    """The phase that a change has come to."""
    change = state.worlds.change
    assert change is not None
    size = len(change.world.machines) * state.shape.workers_per_machine
    if change.held:
        return f"survivors: {_progress_after_loss(change)}"
    if change.taken:
        return "some taken"
    if change.offered:
        return "all offered" if len(change.offered) == state.world_size else "some offered"
    if state.layouts.pending is not None and state.layouts.pending.world:
        return "a switch requested"
    if len(change.prepared) == size:
        return "all prepared"
    return "some prepared" if change.prepared else "nobody prepared"


def _progress_after_loss(change: Change) -> str:
    if change.taken:
        return "some taken"
    if change.offered:
        return "some offered"
    return "all reported" if change.sources else "some prepared" if change.prepared else "nobody prepared"


class WorldsJob(_Operators):
    """A pipeline with one stage for each worker of its world; see :class:`SimulatedJob`."""

    def __init__(
        self, seed: int, machines: int, workers: int = 1, *, trace: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(seed, machines, workers, trace=trace, faults=FAULTS | _OF_CHANGES)
        self._begin()


class ReplicatedWorldsJob(_Operators, ReplicatedJob):
    """A data-parallel job whose number of replicas changes; see :class:`SimulatedJob`."""

    def __init__(
        self, seed: int, machines: int, workers: int = 1, *, trace: Callable[[str], None] | None = None
    ) -> None:
        ReplicatedJob.__init__(
            self, seed, machines, workers, trace=trace, faults=FAULTS_OF_REPLICAS | _OF_CHANGES
        )
        self._begin()


class SurvivorsJob(_Operators, ReplicatedJob):
    """A data-parallel job that goes on with fewer replicas after a loss; see :class:`SimulatedJob`."""

    def __init__(
        self, seed: int, machines: int, workers: int = 1, *, trace: Callable[[str], None] | None = None
    ) -> None:
        ReplicatedJob.__init__(
            self,
            seed,
            machines,
            workers,
            trace=trace,
            faults=FAULTS_OF_REPLICAS | _OF_CHANGES,
            shrinks=True,
        )
        self._begin()


class SurvivingShardsJob(_Operators, MemoryJob):
    """Shards whose copies in memory become those of fewer workers after a loss; see :class:`SimulatedJob`."""

    def __init__(
        self, seed: int, machines: int, workers: int = 1, *, trace: Callable[[str], None] | None = None
    ) -> None:
        faults = FAULTS_OF_COPIES | _OF_CHANGES
        MemoryJob.__init__(self, seed, machines, workers, trace=trace, faults=faults, shrinks=True)
        self._begin()


class SurvivingPipelinesJob(_Operators, PipelinesJob):
    """Pipelines of a stack of layers that become unlike as machines are lost; see :class:`SimulatedJob`."""

    def __init__(
        self, seed: int, machines: int, workers: int = 1, *, trace: Callable[[str], None] | None = None
    ) -> None:
        faults = FAULTS_OF_PIPELINES | _OF_CHANGES
        PipelinesJob.__init__(self, seed, machines, workers, trace=trace, faults=faults, shrinks=True)
        self._begin()
        self._changes_left = 0  # no operator asks for anything: its pipelines need a plan
        self.min_stages = self.rng.choice((1, 1, machines * workers // 2 - 1 or 1))

    def _check_switch(self, before: State, after: State) -> None:
        super()._check_switch(before, after)
        plan = after.worlds.present.plan
        cuts = [pipeline.cut for pipeline in plan_from_json(plan).pipelines] if plan else self.cuts
        stages = [*map(len, cuts)]
        self.seen[f"unlike pipelines follow: {len({*stages}) > 1}"] += 1
        if min(stages) < self.min_stages or len(stages) != 2:
            raise Violation(f"pipelines of {stages} stages follow, and one needs {self.min_stages}")
