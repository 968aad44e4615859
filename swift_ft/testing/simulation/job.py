"""A simulated job: it drives the recovery protocol through a seeded order of failures.

Machines, workers and a journal, without sockets, threads or a clock. Each participant has read the journal up
to a position of its own and acts on what it has read, at random times. Faults are drawn from the same seed.
A run raises :class:`Violation` when something happens that must never happen.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import Plan, RecoveryMode
from swift_ft.testing.simulation.clock import Clock
from swift_ft.testing.simulation.cluster import Cluster
from swift_ft.testing.simulation.faults import FAULTS, Faults
from swift_ft.testing.simulation.invariants import (
    check_contents,
    check_plan,
    check_reports,
    check_requested_checkpoint,
    check_step,
    kinds_of_replays,
)
from swift_ft.testing.simulation.machine import Machine
from swift_ft.testing.simulation.store import GENESIS, Violation, advance
from swift_ft.testing.simulation.worker import Worker
from swift_ft.testing.simulation.world import Host

MAX_TICKS = 30_000
"""Runs take a few hundred; a run that takes this many makes no progress."""

_ENOUGH_IDLE = 30
"""Turns in a row without anything to do, after which a deadline may have to pass."""


_MAX_TRIES = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run, and what happened in it.

    Attributes:
        ok: the job succeeded; otherwise it gave up, with an excuse.
        reason: why it ended.
        events: length of the journal.
        ticks: steps of the simulation.
        seen: how often each kind of thing happened.
    """

    ok: bool
    reason: str
    events: int
    ticks: int
    seen: Counter[str]


class SimulatedJob(Cluster):
    """One run of a pipeline with one stage per worker.

    Args:
        seed: decides everything.
        machines: slots.
        workers: per machine.
        sessionless: the script has no session.
        trace: called with each line of the run's journal, if given.
        faults: weights by fault.
        shrinks: a smaller world may answer a loss.
    """

    def __init__(
        self,
        seed: int,
        machines: int,
        workers: int = 1,
        *,
        sessionless: bool = False,
        trace: Callable[[str], None] | None = None,
        faults: Mapping[str, int] = FAULTS,
        shrinks: bool = False,
    ) -> None:
        super().__init__(seed, machines, workers, sessionless=sessionless, trace=trace)
        self._clock = Clock(self)
        self._faults = Faults(self, self._clock, faults)
        self._checked_groups: set[int] = set()
        self._ways_back = WaysBack()
        restarts = self.rng.choice((0, 0, 1, 2))
        max_failures = self.rng.randint(0, 3) if self.rng.random() < 0.1 else None
        # Of its own random numbers, so that seeds stay what they were.
        machine_limit = random.Random(f"left out {seed}").choice((None, None, 1, 2, 3))
        for iterations in self.settings.resume:
            self._store_earlier_run(iterations)
        self.append(
            ev.JobOpened(
                machines=machines,
                workers_per_machine=workers,
                restarts=restarts,
                max_failures=max_failures,
                setup=self.setup,
                shrinks=shrinks,
                max_machine_failures=machine_limit,
            ),
            "simulation",
        )
        for _ in range(machines + self.rng.choice((0, 0, 1, 2))):
            self.add_machine()

    def _store_earlier_run(self, iterations: int) -> None:
        """The store holds a committed checkpoint of an earlier run."""
        content = self._content_after(iterations)
        paths = {rank: f"{iterations}/rank-{rank}.earlier" for rank in range(self.world_size)}
        for path in paths.values():
            self.store.write_part(path, content)
        self.store.commit(iterations, paths, self.world_size)

    def _content_after(self, iterations: int) -> Any:
        content = GENESIS
        for i in range(iterations):
            content = advance(content, i, -1)
        return content

    def freezes_before_write(self, machine: Host, event: ev.Event) -> bool:
        """Whether a machine freezes between a worker's decision to write an event and the write."""
        return self._clock.freezes_before_write(machine, event)

    # ---------------------------------------------------------------------------------------- invariants

    def state_changed(self, before: State, after: State) -> None:
        """Check the new state; faults like to strike when the phase has changed."""
        if isinstance(self.events[-1], ev.SessionlessWorkers) and self.shapes_known:
            raise Violation("states are given up for a script that has a session")
        self._check(before, after)
        self._ways_back.check(before, after, self.events[-1])
        if after.phase != before.phase or after.generation != before.generation:
            self._phase_changed(before, after)

    def _phase_changed(self, before: State, after: State) -> None:
        if after.phase == Phase.LIVE:
            self.fault_timing.job_is_live(self.ticks)
        if after.phase == Phase.RECOVERING:  # short and full of events: faults seldom strike here by chance
            self.provoke_fault(0.8, (1, 2, 4, 10, 20, 40))
        else:
            self.provoke_fault(0.4 if after.generation > 1 else 0.1, (1, 4, 10, 20, 40))
        self._clock.hasten_thaw(0.9 if after.phase == Phase.RECOVERING else 0.1)
        if after.plan is not None and before.plan is None:
            self.seen[f"mode: {after.plan.mode}"] += 1
            self._check_plan(after, after.plan)

    def _check(self, before: State, after: State) -> None:
        """Check what the protocol guarantees for any event, and count what is rare."""
        check_step(before, after, self.events[-1])
        if after.phase != Phase.ENDED:
            self.store.check_kept(after.checkpoints.kept)
        if after.checkpoints.committed != before.checkpoints.committed and isinstance(
            self.events[-1], ev.CheckpointDamaged
        ):
            self.seen["returned to an older checkpoint"] += 1
        check_requested_checkpoint(before, after, self.events[-1], self.workers)
        regular = self.settings.checkpoint_every
        if (
            after.checkpoints.committed not in (None, before.checkpoints.committed)
            and after.checkpoints.committed % regular
        ):
            self.seen["early checkpoint committed"] += 1

    def _check_plan(self, state: State, plan: Plan) -> None:
        check_plan(state, plan, resumed=bool(self.settings.resume))
        if kept := check_reports(state, plan, self.workers):
            self.seen["plan with reports of an earlier generation"] += 1
            self.seen["reports of an earlier generation"] += kept
        self.seen.update(kinds_of_replays(state, plan))

    def check_formed(self, generation: int, plan: Plan) -> None:
        """All states of a new group are of one history, before any member takes a step."""
        if generation in self._checked_groups:
            return
        self._checked_groups.add(generation)
        group = [w for w in self.workers if generation in (w.active_generation, w.joining_generation)]
        present = self.states[-1].worlds.present.number
        if len(group) != self.world_size or len({w.rank for w in group}) != self.world_size:
            raise Violation(f"the group of generation {generation} is {group}")
        if {w.world_number for w in group} != {present} and self.states[-1].generation == generation:
            raise Violation(f"the group of generation {generation} is not of world {present}: {group}")
        self._check_contents(generation, plan, group)
        self.seen["formed"] += 1

    def _check_contents(self, generation: int, plan: Plan, group: list[Worker]) -> None:
        check_contents(generation, plan, group)

    # -------------------------------------------------------------------------------------------- running

    def run(self) -> Outcome:
        """Let all participants act until none is left.

        Raises:
            Violation: when something happens that must never happen.
        """
        rng, idle = self.rng, 0
        while True:
            self.ticks += 1
            if self.ticks > MAX_TICKS:
                raise Violation(f"no end after {MAX_TICKS} ticks in phase {self.states[-1].phase}")
            candidates = self.candidates()
            self.heads.act()
            self.each_tick()
            if self.fault_timing.is_due(self.ticks):
                self._faults.strike()
                continue
            if self._clock.thaw_due():
                continue
            if not candidates:
                if self.heads.flush_all():
                    continue
                if not self._clock.revive():
                    break
                continue
            participant = candidates[int(rng.random() * len(candidates))]
            idle = 0 if self._take_turn(participant) else idle + 1
            if idle > _ENOUGH_IDLE and self.heads.flush_all():
                idle = 0
            if idle > _ENOUGH_IDLE and not self._all_take_turns():
                idle = 0
                if not self._clock.pass_deadline():
                    raise Violation(f"stuck in phase {self.states[-1].phase}: {self.workers}")
        return self._outcome()

    def each_tick(self) -> None:
        """Called before anybody acts: what operators of the job do."""

    def _take_turn(self, participant: Worker | Machine) -> bool:
        """Let a participant read some of the journal, and act. False if it did neither."""
        rng, end = self.rng, len(self.events)
        behind = end - participant.position
        read = 0
        if behind and rng.random() < self.settings.news_rate:
            chance = rng.random()
            if chance < 0.5:
                read = behind
            elif chance < 0.8:
                read = int(rng.random() * (behind + 1))
            if read:
                participant.read(participant.position + read)
        if isinstance(participant, Machine):
            return (participant.alive and participant.act()) or read > 0
        acted = False
        for _ in range(1 + int(rng.random() * 4)):
            if not participant.alive or participant.frozen or not participant.act():
                break
            acted = True
        return acted or read > 0

    def _all_take_turns(self) -> bool:
        """Whether any participant has anything to do, once all have read everything."""
        acted = False
        participants: list[Worker | Machine] = [*self.machines, *self.workers]
        for participant in participants:
            if participant.alive and not participant.frozen:
                if participant.position < len(self.events):
                    participant.read(len(self.events))
                    acted = True
                acted = (participant.alive and participant.act()) or acted
        return acted

    def _outcome(self) -> Outcome:
        verdict = self.states[-1].verdict
        ok = verdict is not None and verdict.ok
        reason = "abandoned" if verdict is None else verdict.reason
        if not ok and not self.settings.sessionless and not self.excuses.cover(reason, self.supply):
            raise Violation(f"ended without success, and without a good reason: {reason}")
        if ok and not self.settings.sessionless:
            self._check_results()
        self.seen["finished" if ok else "gave up"] += 1
        return Outcome(ok, reason, len(self.events), self.ticks, self.seen)

    def _check_results(self) -> None:
        contents = set(self.results.values())
        complete = len(self.results) == self.world_size or self.excuses.left_early
        if not complete or len(contents) > 1:
            raise Violation(f"finished with different states: {self.results}")
        iterations = self.settings.iterations
        if any(content.iteration != iterations for content in contents):
            raise Violation(f"finished at another iteration than {iterations}: {self.results}")
        due = iterations % self.settings.checkpoint_every == 0 and not self.excuses.left_early
        if due and self.states[-1].checkpoints.committed != iterations:
            raise Violation(f"finished, and the checkpoint of iteration {iterations} is not committed")


# No way back to training is tried a third time for the same loss, whatever fails.
#
# This is derived from what happens, and not from what the protocol counts (`recovery/attempts.py`).


class WaysBack:
    """Counts, for each part that fails, the plans of one way that it has ended since training advanced."""

    def __init__(self) -> None:
        self._ended: Counter[tuple[str, str]] = Counter()  # by way and part
        self._ended_last: list[str] = []
        self._plan: Plan | None = None
        self._went_live = False

    def check(self, before: State, after: State, event: ev.Event) -> None:
        """Look at one event.

        Raises:
            Violation: if a way is chosen that the same part has ended twice.
        """
        if after.checkpoints.committed != before.checkpoints.committed:
            self._ended.clear()
        if before.plan is not None and after.plan is None:
            self._plan, self._went_live = before.plan, before.phase == Phase.LIVE
            self._ended_last = _ended_by(before, before.plan, event)
            for part in self._ended_last:
                self._ended[_way(before.plan), part] += 1
        if isinstance(event, ev.StatusReported) and after.round is not before.round:
            self._note_progress([*before.round.statuses.values(), event], before)
        if before.plan is None and after.plan is not None:
            self._begins(after.plan)

    def _note_progress(self, reports: list[ev.StatusReported], state: State) -> None:
        """If an iteration was trained since the last plan, the next loss is another one."""
        reached = [report.iteration for report in reports if report.live and report.iteration is not None]
        if len(reports) == state.world_size and self._plan is not None and self._went_live:
            saved = state.checkpoints.committed or 0  # all that is left if all machines were lost
            if min(reached, default=saved) > self._plan.resume:
                self._ended.clear()
            self._went_live = False

    def _begins(self, plan: Plan) -> None:
        worn = [part for part in self._ended_last if self._ended[_way(plan), part] >= _MAX_TRIES]
        if worn:
            raise Violation(f"{plan.mode} is tried again although {', '.join(worn)} ended it twice")


def _way(plan: Plan) -> str:
    in_place = (
        RecoveryMode.CONTINUE,
        RecoveryMode.LAYOUT,
        RecoveryMode.REPLICA,
        RecoveryMode.REPLAY,
    )
    if plan.mode == RecoveryMode.MEMORY:
        return "from memory"
    return "in place" if plan.mode in in_place else "from the checkpoint"


def _ended_by(state: State, plan: Plan, event: ev.Event) -> list[str]:
    """The parts that end a plan in which they had something to do."""
    match event:
        case ev.CommunicationFailed():
            return ["communication"]
        case ev.ReplayFailed():
            return ["the state"]
        case ev.DeadlinePassed():
            return ["a deadline"]
        case ev.MachineLost(on_request=False):
            slot = state.slot_of(event.machine)
            ranks = range(0) if slot is None else state.ranks_of(slot)
            return [f"slot {slot}"] if any(not plan.tasks[rank].idle for rank in ranks) else []
        case _:
            return []
