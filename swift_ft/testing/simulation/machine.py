"""A simulated machine: an agent, its workers, and the sentinel that watches a few neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from swift_ft.recovery import events as ev
from swift_ft.recovery.exclusion import is_deserted
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import AgentTodo, agent_order, neighbours_of
from swift_ft.recovery.worlds import Change, NextTodo, next_todo
from swift_ft.testing.simulation.connection import Mode
from swift_ft.testing.simulation.process import FENCED
from swift_ft.testing.simulation.worker import Worker
from swift_ft.testing.simulation.world import World

_NO_ROOM = 0.02
"""The chance that a machine has no room for workers of the next world."""
_NEXT_TAKES = 800
"""Ticks after which an agent gives a change up."""


class Machine:
    """One launcher agent with its workers. It knows the journal up to ``position`` only.

    Args:
        world: the world that it joins.
        base: its name, to which it appends the number of its incarnation.
        make_worker: called with the machine, a rank and a generation to start a worker.
        host: the machine on which it is a guest; empty for a machine of its own.
        slot: that it would rather fill.

    Attributes:
        guests: machines that die with this one.
        alive: the agent's process has not ended.
        started_in: the generation that its workers were started in.
        reported_lost: machines that it has reported lost under its current name.
        sessionless_in: the last generation in which it reported that its workers have no session.
        usage_failure: a worker failed because it was used wrongly.
        stranger: its workers run another program than the job's, and find that out.
        next_world: the world that is to take over whose workers it has started; None for none.
        next_workers: these.
        unanswered: its joins that are on their way through heads.
    """

    def __init__(
        self,
        world: World,
        base: str,
        make_worker: Callable[[Machine, int, int], Worker],
        *,
        host: str = "",
        slot: int | None = None,
    ) -> None:
        self.world = world
        self.guests: list[Machine] = []
        self._host, self._slot = host, slot
        self.base = base
        self.name = f"{base}.0"
        self.position = len(world.events)
        self.workers: list[Worker] = []
        self.next_world: int | None = None
        self.next_workers: list[Worker] = []
        self._next_since = 0
        self._next_failed = False
        self.started_in: int | None = None
        self.sessionless_in = 0
        self.reported_lost: set[str] = set()
        self.alive = True
        self.frozen = False
        self.usage_failure = False
        self.stranger = False
        self.unanswered = 0
        self._incarnation = 0
        self._ring: tuple[Mapping[str, str], str, tuple[str, ...]] | None = None
        self._make_worker = make_worker

    def __repr__(self) -> str:
        return f"agent {self.name}"

    @property
    def processes(self) -> list[Worker]:
        """Its workers, and those of the next world."""
        return [*self.workers, *self.next_workers]

    @property
    def has_unwritten_events(self) -> bool:
        """Whether a worker has decided to append an event, and has not appended it yet."""
        return any(worker.unwritten_event is not None for worker in self.processes)

    @property
    def view(self) -> State:
        """The state as far as this agent has read."""
        return self.world.states[self.position]

    def append(self, event: ev.Event) -> None:
        """Append an event to the journal. Agents do not wait until they have read it back."""
        self.world.append(event, repr(self))

    def read(self, until: int) -> None:
        """Read all blocks of the journal up to a position."""
        self.position = max(self.position, self.world.end_before(until))

    def answered(self, position: int) -> None:
        """It has joined. It learns of that when it reads."""

    def join(self) -> None:
        """Offer the machine to the job, with others in one block if heads merge the joins."""
        event = ev.MachineJoined(
            machine=self.name,
            preferred_slot=self._slot,
            address=f"{self.base}:1",
            setup=self.world.setup,
            domain=self.world.domain_of(self.base),
            host=self._host,
            identity="" if self._host else f"host of {self.base}",
        )
        self.world.heads.send(self, event, repr(self))

    def die(self) -> None:
        """The machine loses its power."""
        self.alive = False
        self.stop_workers()
        for guest in self.guests:
            guest.die()
        self.world.membership_changed()

    def stop_workers(self) -> None:
        """Kill all workers."""
        self._drop_next()
        self._kill(self.workers)
        self.workers = []

    def _kill(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            if worker.alive:
                worker.exit(-9)
        self.world.membership_changed()

    # ----------------------------------------------------------------------------------- one small step

    def act(self) -> bool:
        """Take one small step. False if there was nothing to do."""
        steps = [self._watch_neighbours, self._watch_workers, self._obey]
        if self.next_world is not None:
            steps.append(self._watch_next)
        self.world.rng.shuffle(steps)
        done = [step() for step in steps if self.alive]
        return any(done)

    def _watch_neighbours(self) -> bool:
        """A killed agent's connection ends at once; a frozen agent is only noticed by the deadline.

        Whether other watchers have reported the same loss already, it may not have read yet.
        """
        if self.view.phase == Phase.ENDED:
            return False
        gone = [name for name in self._watched() if not self.world.machine_named(name).alive]
        for neighbour in gone[:1]:
            self._report_lost(neighbour, "its agent's connection ended")
        return bool(gone)

    def wake_up(self) -> None:
        """After a freeze, its neighbours seem to have been silent."""
        for neighbour in neighbours_of(self.name, self.view.membership.addresses)[:1]:
            self._report_lost(neighbour, "its agent was silent", silent=True)

    def miss_heartbeats(self) -> bool:
        """The deadlines for heartbeats passed. False if all heartbeats came in time."""
        for neighbour in self._watched():
            if self.world.machine_named(neighbour).frozen:
                self._report_lost(neighbour, "its agent was silent", silent=True)
                return True
        for worker in self.workers:
            if worker.alive and worker.frozen:
                worker.exit(-9)
                if self.world.rng.random() < 0.2:
                    self.append(ev.WorkerCameBack(machine=self.name, rank=worker.rank))
                return True
        return False

    def _watched(self) -> list[str]:
        """The machines that it watches, and has not reported yet."""
        addresses = self.view.membership.addresses
        if self._ring is None or self._ring[0] is not addresses or self._ring[1] != self.name:
            self._ring = addresses, self.name, neighbours_of(self.name, addresses)
        return [name for name in self._ring[2] if name not in self.reported_lost]

    def _report_lost(self, machine: str, reason: str, *, silent: bool = False) -> None:
        self.reported_lost.add(machine)
        self.append(ev.MachineLost(machine=machine, reason=reason, reporter=self.name, silent=silent))

    def _watch_workers(self) -> bool:
        """Report workers that ended."""
        ended = [w for w in self.workers if not w.alive]
        if not ended:
            return False
        worker = next((w for w in ended if w.exit_code), ended[0])
        self.workers.remove(worker)
        assert worker.exit_code is not None
        if worker.exit_code == 0:
            started_in = self.started_in or 0
            self.append(ev.ScriptExited(machine=self.name, started_in=started_in, rank=worker.rank))
            return True
        if worker.exit_code == FENCED:
            return True  # the journal already says that it was replaced
        if worker.exit_code < 0:
            self.append(
                ev.MachineLost(
                    machine=self.name, reason=f"worker {worker.rank} ended with {worker.exit_code}"
                )
            )
        else:
            reason, code = f"worker {worker.rank} raised", worker.exit_code
            self.append(
                ev.ScriptFailed(
                    machine=self.name,
                    started_in=self.started_in or 0,
                    reason=reason,
                    exit_code=code,
                    usage=self.usage_failure or self.stranger,
                    differs=self.stranger,
                )
            )
        return True

    def _obey(self) -> bool:
        state = self.view
        order = agent_order(state, machine=self.name, started_in=self.started_in)
        if order.todo in (AgentTodo.WAIT, AgentTodo.LAUNCH, AgentTodo.RETIRE) and self._obey_for_next(state):
            return True
        match order.todo:
            case AgentTodo.STOP | AgentTodo.REFUSED:
                if order.todo == AgentTodo.REFUSED and is_deserted(state):
                    self.append(ev.JobClosed(reason=f"no machine of this run is left: {order.reason}"))
                self.die()
            case AgentTodo.LEAVE:
                self.append(ev.MachineLost(machine=self.name, reason="it was drained", on_request=True))
                self.die()
            case AgentTodo.REJOIN:
                self.stop_workers()
                self._incarnation += 1
                self.name = f"{self.base}.{self._incarnation}"
                self.started_in = None
                self.reported_lost.clear()  # what it reported under the old name did not count
                self.world.membership_changed()
                self.join()
            case AgentTodo.RETIRE:
                self.stop_workers()
                self.started_in = None
                self.world.seen["a machine became a spare"] += 1
            case AgentTodo.LAUNCH:
                assert order.slot is not None
                self._launch(state, order.generation, state.ranks_of(order.slot))
            case AgentTodo.WAIT:
                return self._report_sessionless(state)
        return True

    def _launch(self, state: State, generation: int, ranks: range) -> None:
        self.stop_workers()
        self.started_in, self.sessionless_in = generation, 0
        # Not if it has not read yet that it was replaced itself: the disk of the others is another one.
        if self.name in self.world.states[-1].membership.slots:
            self.world.store.replace_machine(ranks)
        world, size = state.worlds.present.number, state.world_size
        self.workers = [self._worker_of(world, size, rank, generation) for rank in ranks]
        self.world.membership_changed()

    def _worker_of(self, world: int, size: int, rank: int, generation: int) -> Worker:
        worker = self._make_worker(self, rank, generation)
        worker.belongs_to(world, size)
        return worker

    # ---------------------------------------------------------------------------------- the next world

    def _obey_for_next(self, state: State) -> bool:
        """Start workers of the next world, end them, or take them over. False if there is nothing to do."""
        match next_todo(state.worlds, self.name, self.next_world):
            case NextTodo.START:
                assert state.worlds.change is not None
                self._start_next(state, state.worlds.change)
            case NextTodo.DROP:
                self._drop_next()
            case NextTodo.ADOPT:
                self._adopt()
            case NextTodo.NOTHING:
                return False
        return True

    def _start_next(self, state: State, change: Change) -> None:
        slot, workers = change.slot_of(self.name), state.shape.workers_per_machine
        assert slot is not None
        self.next_world, self._next_since, self._next_failed = change.world.number, self.world.ticks, False
        if self.world.rng.random() < _NO_ROOM:
            self._give_up_next("too little memory")
            return
        size = len(change.world.machines) * workers
        self.next_workers = [
            self._worker_of(change.world.number, size, rank, change.started_in)
            for rank in state.ranks_of(slot)
        ]
        self.world.membership_changed()

    def _drop_next(self) -> None:
        self._kill(self.next_workers)
        self.next_world, self.next_workers = None, []

    def _adopt(self) -> None:
        """The next world has taken over. What has ended of it until now counts as a loss from now on."""
        self._kill(self.workers)
        self.workers, self.next_workers = self.next_workers, []
        self.next_world, self.started_in = None, self.workers[0].started_in
        self.sessionless_in = 0
        self.world.seen["a machine adopted"] += 1
        self.world.membership_changed()

    def _watch_next(self) -> bool:
        """Give the change up if a worker of the next world has ended, or if all takes too long."""
        if self.next_world is None or self._next_failed:
            return False
        ended = [w for w in self.next_workers if w.exit_code not in (None, FENCED)]
        if ended:
            self._give_up_next(f"worker {ended[0].rank} of the next world ended with {ended[0].exit_code}")
        elif self.world.ticks - self._next_since > _NEXT_TAKES:
            self._give_up_next("the next world takes too long")
        return self._next_failed

    def _give_up_next(self, reason: str) -> None:
        assert self.next_world is not None
        self._next_failed = True
        self.world.seen["given up by an agent"] += 1
        self.append(ev.ChangeGivenUp(world=self.next_world, reason=reason))

    def _report_sessionless(self, state: State) -> bool:
        if state.phase != Phase.AGREEING or self.sessionless_in >= state.generation:
            return False
        outdated = self.started_in is not None and self.started_in < state.generation
        sessionless = any(w.mode in (Mode.BOOT, Mode.SESSIONLESS) for w in self.workers)
        if not outdated or (self.workers and not sessionless):
            return False
        self.sessionless_in = state.generation
        self.append(ev.SessionlessWorkers(machine=self.name, generation=state.generation))
        return True
