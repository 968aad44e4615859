"""The process of a simulated worker: it follows the journal, appends events, keeps a log and checkpoints."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import WorkerOrder, commit_due, saves_again, worker_order
from swift_ft.recovery.topology import checkpoint_owner
from swift_ft.testing.simulation.store import Content, Logged, advance
from swift_ft.testing.simulation.world import Group, Host, World

FENCED = 117
"""Exit code of a worker that was replaced."""


@dataclass(slots=True)
class Save:
    """A part of a checkpoint that a background thread writes. One that a replica writes is only named."""

    content: Content
    epoch: int
    generation: int
    path: str
    own: bool
    written: bool = False


@dataclass(slots=True)
class Commit:
    """A commit in progress: first the marker, then the event."""

    iteration: int
    state: State
    written: bool = False


class Process:
    """One process. It knows the journal up to ``position`` only.

    Attributes:
        started_in: the generation that started it.
        world_number: of the world that it belongs to.
        size: number of workers of that world.
        position: events that it has read.
        unwritten_event: an event that it decided to append, and has not appended yet.
        unanswered: its events that are on their way. It waits for them.
        answered_at: the length of the journal when the last of them was in it.
        content: its state, if it has any.
        active_generation: the generation whose group it is in.
        joining_generation: the generation whose group it is about to form.
        expected_order: the order that holds while ``active_generation`` lasts.
        replay_group: the workers with which it replays jointly.
        replay_members: the workers with which it is connected in a replay: its replay group, or all members
            of a parallel replay.
        unflushed: what it sent, by iteration, and has not logged yet.
        log_gap_before: its log lacks iterations before this one, because it could not be written.
        retained_sends: what it sent inside the machine in the last iteration, with its number.
    """

    def __init__(self, world: World, machine: Host, rank: int, started_in: int) -> None:
        self.world, self.machine, self.rank, self.started_in = world, machine, rank, started_in
        self.machine_name = machine.name
        self.world_number, self.size = world.states[-1].worlds.present.number, world.world_size
        self.position = len(world.events)  # the follower catches up before the script begins
        self.exit_code: int | None = None
        self.frozen = False
        self.unwritten_event: ev.Event | None = None
        self.unanswered = 0
        self.answered_at = 0
        self.content: Content | None = None
        self.active_generation: int | None = None
        self.joining_generation: int | None = None
        self.expected_order = WorkerOrder.RUN
        self.replay_group: tuple[int, ...] = ()
        self.replay_members: tuple[int, ...] = ()
        self.log_generation = 0
        self.log_since = 0
        self.unflushed: dict[int, Logged] = {}
        self.retained_sends: tuple[int, Logged] | None = None
        self.log_gap_before = 0
        self.saves: list[Save] = []
        self.commits: list[Commit] = []
        self.cleanups: list[State] = []
        self._commits_begun: set[tuple[int, int]] = set()
        self._cleaned: tuple[int, int] | None = None
        self._orders: tuple[tuple[State, WorkerOrder], ...] = ()

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self.exit_code is None

    @property
    def is_next(self) -> bool:
        """Whether its world has not taken over."""
        return self.world_number > self.world.states[-1].worlds.present.number

    def belongs_to(self, world: int, size: int) -> None:
        """Say to which world it belongs, before it does anything."""
        self.world_number, self.size = world, size
        self._orders = ()

    @property
    def slot(self) -> int:
        """The slot of its machine."""
        return self.rank // self.world.states[-1].shape.workers_per_machine

    @property
    def view(self) -> State:
        """The state as far as this worker has read."""
        return self.world.states[self.position]

    def order(self, state: State) -> WorkerOrder:
        """The order of this worker in a state."""
        # Asked again and again about the same two states: what it has read, and the newest.
        for known, order in self._orders:
            if known is state:
                return order
        order = worker_order(
            state,
            machine=self.machine_name,
            rank=self.rank,
            started_in=self.started_in,
            world=self.world_number,
        )
        self._orders = (*self._orders[-1:], (state, order))
        return order

    def generation_over(self, state: State) -> bool:
        """Whether the generation that it is active in has ended."""
        return self.active_generation is not None and (
            self.order(state) != self.expected_order or state.generation != self.active_generation
        )

    def _outdated(self, state: State) -> bool:
        """Whether newer events, which it has not read, cancel what it does."""
        newest = self.world.states[-1]
        return newest.generation != state.generation or self.order(newest) != self.order(state)

    @property
    def before(self) -> int | None:
        """The worker with the previous stage."""
        return self.rank - 1 if self.rank else None

    @property
    def after(self) -> int | None:
        """The worker with the next stage."""
        return self.rank + 1 if self.rank + 1 < self.size else None

    def neighbours(self) -> list[int]:
        """The workers with the previous and the next stage."""
        return [rank for rank in (self.before, self.after) if rank is not None]

    # ------------------------------------------------------------------------------------- the journal

    def read(self, until: int) -> bool:
        """The follower thread reads all blocks up to a position. False if that ends the process."""
        if self.world.settings.sessionless:
            self.position = max(self.position, self.world.end_before(until))
            return True
        ends = self.world.ends
        for number in range(bisect_right(ends, self.position), bisect_right(ends, until)):
            self.position = ends[number]
            state = self.world.states[self.position]
            if self.world_number != state.worlds.present.number:
                continue  # duties are those of the present world's workers
            if self.rank == 0 and (due := commit_due(state, 0)) is not None:
                self._begin_commit(due, state)
            known = state.checkpoints.committed
            newest = None if known is None else (state.checkpoints.epoch, known)
            if state.phase == Phase.LIVE and newest not in (None, self._cleaned):
                self._cleaned = newest
                self.cleanups.append(state)
        if self.order(self.view) == WorkerOrder.DIE:
            self.exit(FENCED)
            return False
        return True

    def append(self, event: ev.Event) -> bool:
        """Append an event to the journal and read up to it. False if that ends the process.

        If the event travels through a head, the process waits, and reads on when it is there.
        """
        if self in self.machine.processes and self.world.freezes_before_write(self.machine, event):
            self.unwritten_event = event
            return True
        position = self.world.heads.send(self, event, repr(self))
        return position is None or self.read(position)

    def answered(self, position: int) -> None:
        """Its event is in the journal. A process that is frozen reads it when it goes on."""
        self.answered_at = position
        if self.alive and not self.frozen:
            self.read(position)

    def exit(self, code: int) -> None:
        """The process ends, whatever it was doing."""
        self.leave_group()
        self.exit_code = code
        self.world.membership_changed()

    def complete(self) -> None:
        """The script returns."""
        assert self.content is not None
        self.world.results[self.rank] = self.content
        self.exit(0)

    # ------------------------------------------------------------------------------------------ groups

    @property
    def group(self) -> Group | None:
        """The group that it is in, or is about to form."""
        generation = self.joining_generation if self.active_generation is None else self.active_generation
        return None if generation is None else self.world.group(generation, replay=bool(self.replay_members))

    def leave_group(self) -> None:
        """Leave the group and close its connections."""
        if (group := self.group) is not None:
            group.gone.add(self.rank)
        self.detach_from_group()

    def detach_from_group(self) -> None:
        """Leave the group, with connections that stay open for the others."""
        self.active_generation, self.joining_generation = None, None
        self.replay_group, self.replay_members = (), ()

    # ----------------------------------------------------------------------------------- background threads

    def act_in_background(self) -> bool:
        """One step of the threads that save, commit and clean up. False if they have nothing to do."""
        if self.saves:
            self._continue_save(self.saves[0])
        elif self.commits:
            self._continue_commit(self.commits[0])
        elif self.cleanups:
            state = self.cleanups.pop(0)
            kept = state.checkpoints.kept
            self.world.store.drop_before(self.rank, kept[-1], state.generation)
            if self.rank == 0:
                self.world.store.clean(kept, state.generation)
        else:
            return False
        return True

    def _continue_save(self, save: Save) -> None:
        if save.own and not save.written:
            self.world.store.write_part(save.path, save.content)
            save.written = True
            return
        self.saves.pop(0)
        self.append(
            ev.PartPersisted(
                rank=self.rank,
                iteration=save.content.iteration,
                epoch=save.epoch,
                generation=save.generation,
                path=save.path,
                digest="a digest" if save.own else "",
            )
        )

    def _continue_commit(self, commit: Commit) -> None:
        if not commit.written:
            parts = commit.state.checkpoints.parts[commit.iteration]
            paths = {rank: part.path for rank, part in parts.items()}
            self.world.store.commit(commit.iteration, paths, commit.state.world_size)
            commit.written = True
            return
        self.commits.pop(0)
        self.append(
            ev.CheckpointCommitted(
                iteration=commit.iteration,
                epoch=commit.state.checkpoints.epoch,
                keep=self.world.settings.keep,
            )
        )

    def _begin_commit(self, due: int, state: State) -> None:
        if (due, state.checkpoints.epoch) not in self._commits_begun:
            self._commits_begun.add((due, state.checkpoints.epoch))
            self.commits.append(Commit(due, state))

    # ------------------------------------------------------------------------------ logs and checkpoints

    def _apply(self, iteration: int, history: int) -> None:
        assert self.content is not None
        self.unflushed[iteration] = Logged(self.content.chain, history)
        self.retained_sends = iteration, self.unflushed[iteration]
        self.content = advance(self.content, iteration, history)
        if self.world.rng.random() < 0.2:
            self.flush()  # the segment is full

    def checkpoint_due(self, iteration: int) -> bool:
        """Whether a checkpoint follows an iteration, as far as this process knows."""
        regular = iteration % self.world.settings.checkpoint_every == 0
        if (
            not regular
            and iteration == self.world.states[-1].checkpoints.requested != self.view.checkpoints.requested
        ):
            self.world.seen["missed an early checkpoint"] += 1
        return regular or iteration == self.view.checkpoints.requested

    def is_inside(self, peer: int) -> bool:
        """Whether messages to another worker stay inside the machine."""
        return peer // self.world.states[-1].shape.workers_per_machine == self.slot

    def retained(self, iteration: int) -> Logged | None:
        """The messages that it sent in an iteration, if they are still in its memory."""
        sends = self.retained_sends
        return sends[1] if sends is not None and sends[0] == iteration else None

    def can_resend(self) -> bool:
        """Whether it can send again what it sent in the last completed iteration."""
        if self.content is None or self.retained(self.content.iteration - 1) is None:
            return False
        if self.log_gap_before >= self.content.iteration:
            return False
        return not self.world.settings.on_device or not any(map(self.is_inside, self.neighbours()))

    def sent_to(self, peer: int, iteration: int) -> Logged | str:
        """The messages that it sent to a neighbour: from its log, or memory if they stayed in the machine."""
        if not self.is_inside(peer):
            return self.world.store.read_log(self.rank, iteration, self.log_since)
        return "missing" if self.world.settings.on_device else self.retained(iteration) or "missing"

    def flush(self) -> None:
        """Write to the log what was sent since the last flush."""
        if self.unflushed:
            if self.world.store.logs_survive or self._fills_its_slot:
                self.world.store.write_log(self.rank, self.log_generation, self.unflushed)
            self.unflushed = {}

    @property
    def _fills_its_slot(self) -> bool:
        """Whether it was neither replaced, nor is of another world."""
        state = self.world.states[-1]
        here = self.world_number == state.worlds.present.number
        return here and state.membership.started_in.get(self.slot) == self.started_in

    def lose_log(self) -> bool:
        """The log could not be written, up to now. False without a state whose log that could be."""
        if self.content is None:
            return False
        self.unflushed = {}
        if self._fills_its_slot:
            self.world.store.logs.pop(self.rank, None)
        self.log_gap_before = self.content.iteration + 1  # the iteration that is under way is not whole
        return True

    def _open_log(self, state: State) -> None:
        if self.log_generation != state.generation:
            self.flush()
            begin = state.plan.tasks[self.rank].begin if state.plan is not None else 0
            self.log_gap_before = min(self.log_gap_before, begin)
            self.log_generation, self.log_since = state.generation, state.checkpoints.log_since
            self.world.store.drop_generations_before(self.rank, state.checkpoints.log_since)

    def save(self, state: State) -> None:
        """The first replica saves for all."""
        self.flush()  # a checkpoint ends the segment
        if saves_again(state, self.rank):
            self.world.seen["saved again"] += 1
        assert self.content is not None
        iteration, generation = self.content.iteration, self.log_generation
        if state.checkpoints.committed is None or iteration > state.checkpoints.committed:
            owner = checkpoint_owner(self.rank, state.round.statuses)
            path = f"{iteration}/rank-{owner}.g{generation}"
            own = owner == self.rank
            self.saves.append(Save(self.content, state.checkpoints.epoch, generation, path, own))
