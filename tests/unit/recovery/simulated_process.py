"""A worker's process in the simulated network: what its coordinator and its background threads do, in small.

It follows the journal, tells events, writes logs and parts of checkpoints, commits and cleans up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulated_store import Content, Group, Logged, advance

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.ladder import keeper_of
from swift_ft.recovery.orders import WorkerOrder, commit_due, worker_order

if TYPE_CHECKING:
    from simulated_machine import Machine
    from simulation import Simulation

__all__ = ["FENCED", "Process", "Saving"]

FENCED = 117
"""Exit code of a worker that found itself replaced."""


@dataclass(slots=True)
class Saving:
    """A part of a checkpoint that a background thread writes."""

    content: Content
    epoch: int
    generation: int
    path: str
    written: bool = False


@dataclass(slots=True)
class Committing:
    """A commit that the housekeeper is at: first the marker, then the word about it."""

    iteration: int
    state: State
    written: bool = False


class Process:
    """One process. It knows the journal up to ``position`` only."""

    def __init__(self, sim: Simulation, machine: Machine, rank: int, launched: int) -> None:
        self.sim, self.machine, self.rank, self.launched = sim, machine, rank, launched
        self.name = machine.name
        self.position = len(sim.events)  # the follower catches up before the script begins
        self.exit_code: int | None = None
        self.frozen = False
        self.in_flight: ev.Event | None = None  # decided, and not written yet
        self.content: Content | None = None
        self.running: int | None = None
        self.joining: int | None = None
        self.meanwhile = WorkerOrder.RUN  # the order that holds while it runs
        self.portion: tuple[int, ...] = ()  # with whom it replays jointly
        self.members: tuple[int, ...] = ()  # with whom it is connected in a replay: they, or all who share it
        self.log_generation = 0
        self.log_since = 0
        self.unflushed: dict[int, Logged] = {}
        self.kept: tuple[int, Logged] | None = None  # what stayed inside the machine in the last iteration
        self.savings: list[Saving] = []
        self.committings: list[Committing] = []
        self.commits_begun: set[tuple[int, int]] = set()
        self.cleaned = -1
        self.cleanings: list[int] = []

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    @property
    def slot(self) -> int:
        return self.rank // self.sim.states[-1].workers

    @property
    def view(self) -> State:
        """The state as far as this worker has read."""
        return self.sim.states[self.position]

    def order(self, state: State) -> WorkerOrder:
        return worker_order(state, machine=self.name, rank=self.rank, launched=self.launched)

    def disturbed(self, state: State) -> bool:
        return self.running is not None and (
            self.order(state) != self.meanwhile or state.generation != self.running
        )

    def _outdated(self, state: State) -> bool:
        """What this worker does was called off, and it has not read that yet."""
        newest = self.sim.states[-1]
        return newest.generation != state.generation or self.order(newest) != self.order(state)

    @property
    def before(self) -> int | None:
        """The worker with the stage before this one's."""
        return self.rank - 1 if self.rank else None

    @property
    def after(self) -> int | None:
        """The worker with the stage after this one's."""
        return self.rank + 1 if self.rank + 1 < self.sim.world else None

    def neighbours(self) -> list[int]:
        return [rank for rank in (self.before, self.after) if rank is not None]

    def read(self, until: int) -> bool:
        """The follower's thread: everything up to a position. False if the process ended over it."""
        if self.sim.bare:
            self.position = until
            return True
        states = self.sim.states
        while self.position < until:
            self.position += 1
            state = states[self.position]
            if self.rank == 0 and (due := commit_due(state, 0)) is not None:
                self._begin_commit(due, state)
            known = state.committed
            if state.phase == Phase.LIVE and known is not None and known > self.cleaned:
                self.cleaned = known
                self.cleanings.append(self.cleaned)
        if self.order(self.view) == WorkerOrder.DIE:
            self.exit(FENCED)
            return False
        return True

    def tell(self, event: ev.Event) -> bool:
        if self.sim.time.holds_back(self, event):
            self.in_flight = event
            return True
        return self.read(self.sim.append(event, repr(self)))

    def exit(self, code: int) -> None:
        """The process ends, whatever it was doing."""
        self.leave_group()
        self.exit_code = code
        self.sim.workers_changed()

    def done(self) -> None:
        """The script returns."""
        assert self.content is not None
        self.sim.results[self.rank] = self.content
        self.exit(0)

    @property
    def group(self) -> Group | None:
        """The one that it is in, or is about to form."""
        generation = self.joining if self.running is None else self.running
        return None if generation is None else self.sim.group(generation, replay=bool(self.members))

    def leave_group(self) -> None:
        if (group := self.group) is not None:
            group.gone.add(self.rank)
        self.keep_group()

    def keep_group(self) -> None:
        """Be in no group any more, with connections that stay open."""
        self.running, self.joining, self.portion, self.members = None, None, (), ()

    # ----------------------------------------------------------------------------------- background threads

    def background(self) -> bool:
        """The threads that save and keep house."""
        if self.savings:
            saving = self.savings[0]
            if not saving.written:
                self.sim.store.parts[saving.path] = saving.content
                saving.written = True
            else:
                self.savings.pop(0)
                at = saving.content.iteration
                self.tell(ev.Durable(self.rank, at, saving.epoch, saving.generation, saving.path))
            return True
        if self.committings:
            commit = self.committings[0]
            if not commit.written:
                parts = commit.state.durable[commit.iteration]
                self.sim.store.commit(commit.iteration, parts, commit.state.world)
                commit.written = True
            else:
                self.committings.pop(0)
                self.tell(ev.Committed(commit.iteration, commit.state.epoch))
            return True
        if self.cleanings:
            iteration = self.cleanings.pop(0)
            self.sim.store.drop_before(self.rank, iteration)
            if self.rank == 0:
                self.sim.store.clean(iteration, self.sim.keep)
            return True
        return False

    def _begin_commit(self, due: int, state: State) -> None:
        if (due, state.epoch) not in self.commits_begun:
            self.commits_begun.add((due, state.epoch))
            self.committings.append(Committing(due, state))

    # ------------------------------------------------------------------------------ logs and checkpoints

    def _apply(self, iteration: int, history: int) -> None:
        assert self.content is not None
        self.unflushed[iteration] = Logged(self.content.chain, history)
        self.kept = iteration, self.unflushed[iteration]
        self.content = advance(self.content, iteration, history)
        if self.due(self.content.iteration):
            self.flush()  # the segment is cut
            self._save(self.view)
        elif self.sim.rng.random() < 0.2:
            self.flush()  # the segment is full

    def due(self, iteration: int) -> bool:
        """Whether a checkpoint follows, as far as this process knows."""
        regular = iteration % self.sim.checkpoint_every == 0
        if not regular and iteration == self.sim.states[-1].wanted != self.view.wanted:
            self.sim.seen["missed an early checkpoint"] += 1
        return regular or iteration == self.view.wanted

    def _ask_now_and_then(self) -> None:
        """Between two steps, as a worker whose log nears its budget; more often than a patient one would."""
        assert self.content is not None
        assert self.running is not None
        if self.sim.rng.random() < self.sim.ask_rate:
            at = self.content.iteration + ev.WANTED_AHEAD
            self.tell(ev.CheckpointWanted(self.rank, at, self.running))

    def is_inside(self, peer: int) -> bool:
        """Whether messages to another worker stay inside the machine."""
        return peer // self.sim.states[-1].workers == self.slot

    def kept_of(self, iteration: int) -> Logged | None:
        """What it keeps in memory of what it sent in an iteration."""
        return self.kept[1] if self.kept is not None and self.kept[0] == iteration else None

    def serves(self) -> bool:
        """Whether it can send again what it sent in the last completed iteration."""
        if self.content is None or self.kept_of(self.content.iteration - 1) is None:
            return False
        return not self.sim.on_device or not any(map(self.is_inside, self.neighbours()))

    def sent_to(self, peer: int, iteration: int) -> Logged | str:
        """What it sent to a neighbour, from its log, or from memory where that is the only place."""
        if not self.is_inside(peer):
            return self.sim.store.read_log(self.rank, iteration, self.log_since)
        return "missing" if self.sim.on_device else self.kept_of(iteration) or "missing"

    def flush(self) -> None:
        if self.unflushed:
            if self.sim.store.logs_outlive or self.sim.states[-1].launched[self.slot] == self.launched:
                self.sim.store.write_log(self.rank, self.log_generation, self.unflushed)
            self.unflushed = {}

    def _open_log(self, state: State) -> None:
        if self.log_generation != state.generation:
            self.flush()
            self.log_generation, self.log_since = state.generation, state.log_since
            self.sim.store.drop_generations_before(self.rank, state.log_since)

    def _save(self, state: State) -> None:
        """The first replica saves for all."""
        assert self.content is not None
        iteration, generation = self.content.iteration, self.log_generation
        if state.committed is None or iteration > state.committed:
            keeper = keeper_of(self.rank, state.reports)
            path = f"{iteration}/rank-{keeper}.g{generation}"
            saving = Saving(self.content, state.epoch, generation, path, written=keeper != self.rank)
            self.savings.append(saving)
