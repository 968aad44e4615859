"""A simulated job whose workers hold nothing twice, and copy their state to each other's memory.

Each has a part that no other one has, so any loss leads to a copy in memory, or to the store. The checks are
those of a pipeline: all states of a new group are of one history (`invariants.check_contents`). A copy of an
abandoned history, or of a worker that others have overtaken, breaks that.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swift_ft.errors import RecoveryError
from swift_ft.recovery.job_state import State
from swift_ft.recovery.memory import CopyPlacement, newest_in_memory
from swift_ft.recovery.plan import RecoveryMode, Task
from swift_ft.recovery.worlds import Change
from swift_ft.runtime.worker.part import Round, StepInfo
from swift_ft.testing.simulation.faults import FAULTS
from swift_ft.testing.simulation.job import SimulatedJob
from swift_ft.testing.simulation.machine import Machine
from swift_ft.testing.simulation.store import Content, Violation
from swift_ft.testing.simulation.worker import Worker
from swift_ft.testing.simulation.world import Host

FAULTS_OF_COPIES = FAULTS | {
    "corrupt_log": 0,
    "lose_log": 0,
    "kill_neighbours": 2,
    "kill_two": 2,
    "break_update": 2,
}


@dataclass(slots=True)
class _Copy:
    """A copy on its way: evict at the holder, deliver, then wait for the verdict."""

    generation: int
    iteration: int
    keep: int | None
    content: Content
    again: bool = False
    begun: bool = False
    delivered: bool = False


class MemoryJob(SimulatedJob):
    """One run; see :class:`SimulatedJob`.

    Attributes:
        every: iterations between two copies.
        verdicts: by generation and iteration: whether a copy is complete.
        held: by generation and iteration: whose copies are held.
    """

    def __init__(
        self,
        seed: int,
        machines: int,
        workers: int = 1,
        *,
        trace: Callable[[str], None] | None = None,
        faults: Mapping[str, int] = FAULTS_OF_COPIES,
        shrinks: bool = False,
    ) -> None:
        self.verdicts: dict[tuple[int, int], bool] = {}
        self.held: dict[tuple[int, int], set[int]] = {}
        self._domains = random.Random(seed).choice((0, 0, 1, 2, 3))
        super().__init__(seed, machines, workers, trace=trace, faults=faults, shrinks=shrinks)
        self.every = self.rng.choice((1, 1, 2, 3))
        self.copy_rate = self.rng.choice((0.5, 0.5, 0.1))
        self.settings.checkpoint_every = self.rng.choice((2, 4, 9))
        self.fault_timing.budget = self.rng.choice((1, 2, 2, 3, 3, 4))

    def domain_of(self, base: str) -> str:
        """The failure domain of a machine, by its number."""
        return f"rack {int(base[1:]) // 2 % self._domains}" if self._domains else ""

    def make_worker(self, machine: Machine, rank: int, started_in: int) -> Worker:
        """Start one worker."""
        return MemoryWorker(self, machine, rank, started_in, self)


class MemoryWorker(Worker):
    """One worker, a small version of `runtime/memory/memory_checkpoints.py`.

    Attributes:
        own: copies of its own state, by iteration: the newest complete one, and the next.
        held: copies of another worker's state.
        accepts: the generation whose copies it takes; None from its report until training continues.
    """

    def __init__(
        self, world: SimulatedJob, machine: Host, rank: int, started_in: int, job: MemoryJob
    ) -> None:
        super().__init__(world, machine, rank, started_in)
        self._job = job
        self._holder: int | None = None
        self._owner: int | None = None  # whose copies it holds
        self.own: dict[int, Content] = {}
        self.held: dict[int, Content] = {}
        self.accepts: int | None = None
        self._base: int | None = None
        self._candidate: int | None = None
        self._copies: deque[_Copy] = deque()

    def act(self) -> bool:
        """Take one small step, of the training thread or of the one that sends copies."""
        if self.unanswered:
            return False
        if self._copies and self.world.rng.random() < self._job.copy_rate:
            return not self.read(self.position) or self._continue_copy(self._copies[0]) or super().act()
        return super().act()

    # ----------------------------------------------------------------------------------------- recovery

    def settle(self, state: State) -> None:
        """It takes and gives no copies until training continues."""
        super().settle(state)
        self.accepts = self._candidate = None
        self._copies.clear()

    def _facts(self) -> dict[str, Any]:
        kept, held = tuple(sorted(self.own)), tuple(sorted(self.held))
        copies = {"kept": kept, "held": held, "held_of": self._owner, "copies": True}
        return {"pipeline_known": True, "holds": (f"shard {self.rank} of {self.size}",), **copies}

    def load(self, state: State, task: Task) -> None:
        """From the store, or from a machine's memory."""
        if (holder := task.holder) is None:
            super().load(state, task)
            return
        self.content, iteration = None, task.load
        assert iteration is not None
        if self.world.store.failing_loads > 0:
            self.world.store.failing_loads -= 1
            raise RecoveryError("the copy is not what was copied")
        copies = self.own if holder == self.rank else getattr(self._process(holder), "held", {})
        if iteration not in copies:
            if self._process(holder) is not None and not self._outdated(state):
                raise Violation(f"{self} finds no copy of iteration {iteration} in the memory of {holder}")
            raise RecoveryError("the copy cannot be fetched")
        self.content = self.own[iteration] = copies[iteration]
        self.world.seen["loaded from its own memory" if holder == self.rank else "loaded from another's"] += 1

    def _to_offer(self, change: Change, iteration: int) -> tuple[int, Content | None]:
        if not change.copies:
            return super()._to_offer(change, iteration)
        rank = change.owed_by(self.rank)[0]
        self.world.seen["offered a copy of its own" if rank == self.rank else "offered another's copy"] += 1
        if rank == self.rank:
            return rank, self.own.get(iteration)
        return rank, self.held.get(iteration) if self._owner == rank else None

    def _process(self, rank: int) -> MemoryWorker | None:
        """The process of a rank, if it answers."""
        there = (w for w in self._job.workers if w.world_number == self.world_number)
        found = [w for w in there if w.rank == rank and w.alive and not w.frozen]
        newest = max(found, key=lambda w: w.started_in, default=None)
        assert newest is None or isinstance(newest, MemoryWorker)
        return newest

    def live(self, round: Round) -> None:
        """Copies are taken and given from now on."""
        plan, state = round.plan, round.state
        placement = CopyPlacement.of(state.domains, state.shape.workers_per_machine)
        if placement is None:
            return
        if self._holder not in (None, placement.holders[self.rank]):
            self.world.seen["another holder"] += 1
        self._holder = placement.holders[self.rank]
        common = newest_in_memory(state.round.statuses)
        base = common.iteration if common is not None and common.iteration <= plan.resume else None
        self.drop_after(plan.tasks[self._owner].end if self._owner is not None else 0)
        self.accepts, self._base = state.generation, base
        self.keep_only(base)
        report = state.round.statuses[self._holder]
        if base in self.own and base is not None and (report.held_of != self.rank or base not in report.held):
            self._copies.append(_Copy(state.generation, base, base, self.own[base], again=True))
            self.world.seen["sent again"] += 1
        if plan.mode in (RecoveryMode.START, RecoveryMode.FALLBACK):
            self._take()

    def keep_only(self, base: int | None) -> None:
        """Its other copies are not complete, or belong to an abandoned history."""
        self.own = {at: copy for at, copy in self.own.items() if at == base}

    def drop_after(self, iteration: int) -> None:
        """Drop the held copies of later iterations: they belong to an abandoned history."""
        self.held = {at: copy for at, copy in self.held.items() if at <= iteration}

    # ------------------------------------------------------------------------------------------- copies

    def boundary(self, step: StepInfo) -> None:
        """A copy is due every so many iterations."""
        super().boundary(step)
        if step.completed % self._job.every == 0:
            self._take()

    def _take(self) -> None:
        assert self.content is not None
        at, generation = self.content.iteration, self.accepts
        if generation is None or at in self.own or self._holder is None:
            return
        if self._candidate is not None:
            self._skip(generation, at)
            return
        self.own[at], self._candidate = self.content, at
        self._copies.append(_Copy(generation, at, self._base, self.content))

    def _skip(self, generation: int, at: int) -> None:
        if not self._job.verdicts.setdefault((generation, at), False):
            self.world.seen["copy skipped"] += 1

    def _continue_copy(self, copy: _Copy) -> bool:
        """One step of the thread that sends. False if it waits."""
        if not copy.delivered:
            return self._deliver(copy)
        verdict = self._job.verdicts.get((copy.generation, copy.iteration))
        if verdict is None:
            if self.world.rng.random() < 0.01:  # a deadline
                self._skip(copy.generation, copy.iteration)
                return True
            return False
        self._copies.popleft()
        self._candidate = None
        if verdict:
            self._base = copy.iteration
            self.own = {at: content for at, content in self.own.items() if at == copy.iteration}
            self.world.seen["copy complete"] += 1
        else:
            self.own.pop(copy.iteration)
        return True

    def _deliver(self, copy: _Copy) -> bool:
        assert self._holder is not None
        holder = self._process(self._holder)
        if holder is None or not holder.takes(copy.generation):
            return False
        if not copy.begun:
            copy.begun = True
            holder.make_room(self.rank, copy.keep)
            return True
        holder.held[copy.iteration] = copy.content
        copy.delivered = True
        if copy.again:
            self._copies.popleft()
            return True
        held = self._job.held.setdefault((copy.generation, copy.iteration), set())
        held.add(self.rank)
        if len(held) == self.world.world_size:
            self._job.verdicts.setdefault((copy.generation, copy.iteration), True)
        return True

    def make_room(self, owner: int, keep: int | None) -> None:
        """A copy comes: what is not needed beside it goes."""
        copies = self.held if owner == self._owner else {}
        self.held, self._owner = {at: copy for at, copy in copies.items() if at == keep}, owner

    def takes(self, generation: int) -> bool:
        """Whether it takes copies of a generation."""
        return self.accepts == generation
