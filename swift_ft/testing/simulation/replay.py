"""A simulated worker whose state is rebuilt: it loads its checkpoint, and replays alone or with others.

Workers that replay jointly are connected as in a live pipeline: a message is available to its receiver once
it is sent, and one worker may complete an iteration a little before another. All other messages are read from
logs. A parallel replay needs all its members, helpers too, in every iteration.
"""

from __future__ import annotations

from swift_ft.recovery import events as ev
from swift_ft.recovery.helpers import ParallelReplay
from swift_ft.recovery.job_state import State
from swift_ft.recovery.orders import WorkerOrder
from swift_ft.testing.simulation.connection import ConnectedProcess, Mode
from swift_ft.testing.simulation.store import Content, Violation

__all__ = ["ReplayingProcess"]


class ReplayingProcess(ConnectedProcess):
    """What a worker does with its task of a plan.

    Attributes:
        dirty: why its state is neither before nor after an iteration, if so.
        replaying: its state is being replayed.
        parallel_replay: the replay that it takes part in, as an owner or as a helper.
        replay_until: iterations that its state will have completed after the replay.
    """

    dirty: str | None = None
    replaying = False
    parallel_replay: ParallelReplay | None = None
    replay_until = 0
    _acted = True

    def _execute(self, state: State) -> None:
        assert state.plan is not None
        task, self.parallel_replay = state.plan.tasks[self.rank], state.plan.parallel_replay_of(self.rank)
        if self._is_helper():
            self._connect(state, None)
            return
        if task.load is not None and not self._load(state, task.load):
            return
        if self.content is None or self.content.iteration != task.begin:
            raise Violation(f"{self} is to begin at iteration {task.begin} with {self.content}")
        self.dirty = None
        self._open_log(state)
        if task.begin >= task.replay_until:
            self.append(ev.WorkerReady(rank=self.rank, generation=state.generation))
            return
        self.replaying, self.replay_until, self.substep, self.mode = True, task.replay_until, 0, Mode.REPLAY
        self.history = self._history_of(state)
        self.replay_group = task.replay_group
        if task.replay_group or self.parallel_replay is not None:
            self._connect(state, self.content)

    def _load(self, state: State, iteration: int) -> bool:
        """Load this worker's part of a checkpoint. False if it cannot be read, or is damaged."""
        if self.world.store.is_damaged(iteration, self.rank):
            self.replaying, self.mode = False, Mode.RECOVER
            self.append(
                ev.CheckpointDamaged(
                    rank=self.rank, generation=state.generation, iteration=iteration, reason="a bit flipped"
                )
            )
            return False
        may_fail = self.world.store.failing_loads > 0
        loaded = self.world.store.load(iteration, self.rank)
        if loaded is None:
            if not may_fail and not self._outdated(state):
                raise Violation(f"{self} cannot load checkpoint {iteration}, which counts as committed")
            self._fail_replay(state.generation, "the checkpoint cannot be read")
            return False
        self.content = loaded
        return True

    def _loads(self, state: State) -> bool:
        """Whether its task is to load a checkpoint that can be read."""
        assert state.plan is not None
        load, store = state.plan.tasks[self.rank].load, self.world.store
        return load is not None and not store.failing_loads and not store.is_damaged(load, self.rank)

    def _is_helper(self) -> bool:
        return self.parallel_replay is not None and self.rank in self.parallel_replay.helpers

    def _connect(self, state: State, content: Content | None) -> None:
        """Begin to connect with all members of the replay. A helper begins without content."""
        shared = self.parallel_replay
        self.active_generation, self.expected_order = state.generation, WorkerOrder.EXECUTE
        self.replay_members = shared.members if shared is not None else self.replay_group
        self.mode = Mode.GATHER
        self.world.group(state.generation, replay=True).ready[self.rank] = content
        self.append(ev.GroupAwaited(rank=self.rank, generation=state.generation))

    def _history_of(self, state: State) -> int:
        """The name of the history that the job continues in."""
        return hash((state.checkpoints.epoch, state.checkpoints.log_since))

    def _fail_replay(self, generation: int, reason: str) -> None:
        self.replaying, self.mode = False, Mode.RECOVER
        self.append(ev.ReplayFailed(rank=self.rank, generation=generation, reason=reason))

    # ---------------------------------------------------------------------------------- with others

    def _gather(self, state: State) -> bool:
        """Wait until all members are about to replay or to help, then connect with them."""
        group = self.group
        assert group is not None
        members = {*self.replay_members}
        if self.rank not in group.joined:
            if self.generation_over(state):
                self._cancel_replay()
                return True
            if not all(rank in state.round.awaiting for rank in members):
                return False  # until the generation is over
            group.joined.add(self.rank)
            return True
        if group.broken or group.gone & members:
            self.fail_communication()
            return True
        if not group.joined >= members:
            return False  # until a deadline
        if self.generation_over(state):
            self._cancel_replay()
            return True
        owners = members if self.parallel_replay is None else {*self.parallel_replay.owners}
        if len({group.ready[rank] for rank in owners}) > 1:
            raise Violation(f"{self} is to replay with {owners}, and they begin with {group.ready}")
        self.mode = Mode.HELP if self._is_helper() else Mode.REPLAY
        self.world.provoke_fault(0.4, (1, 4, 10, 20, 40))
        return True

    def _help(self, state: State) -> bool:
        """Compute for the owners, until each has completed its last iteration."""
        group, shared = self.group, self.parallel_replay
        assert group is not None
        assert shared is not None
        if self.generation_over(state):
            self._cancel_replay()
            return True
        if group.broken or group.gone & {*shared.members}:
            self.fail_communication()
            return True
        if self.world.rng.random() < 0.01:
            self.world.seen["declined to help"] += 1
            self._cancel_replay()
            self.append(
                ev.HelpDeclined(rank=self.rank, generation=state.generation, reason="not enough memory")
            )
            return True
        if any((owner, self.rank, shared.until - 1) not in group.mail for owner in shared.owners):
            return False
        self.world.seen["helped"] += 1
        self.detach_from_group()
        self.mode = Mode.RECOVER
        self.append(ev.WorkerReady(rank=self.rank, generation=state.generation))
        return True

    def _receive_help(self, iteration: int) -> bool:
        """Receive what the helpers computed. False if one of them is gone."""
        group, shared = self.group, self.parallel_replay
        if shared is None:
            return True
        assert group is not None
        if group.broken or group.gone & {*shared.members}:
            self.fail_communication()
            return False
        for helper in shared.helpers:
            group.mail[self.rank, helper, iteration] = (0, 0)
        return True

    def _cancel_replay(self) -> None:
        """Another generation has begun. The iterations replayed so far are kept."""
        self.leave_group()
        self.mode = Mode.RECOVER

    # -------------------------------------------------------------------------------------- an iteration

    def _replay(self, state: State) -> bool:
        """One iteration, or in a joint replay a part of one."""
        if self.substep == 0:
            if not self._replay_due(state):
                self._cancel_replay()
                return True
            if self.world.rng.random() < 0.5:
                return True  # computing takes a while
        assert self.content is not None
        iteration = self.content.iteration
        while self.substep < 4:
            peer = self.before if self.substep in (0, 3) else self.after
            exchange = self._replay_from if self.substep % 2 == 0 else self._replay_to
            if peer is not None and not exchange(peer, iteration):
                return self.mode != Mode.REPLAY
            self.substep += 1
            if self.replay_group:
                return True
        if not self._average_gradients(iteration):
            return self._acted
        if not self._receive_help(iteration):
            return True
        self.substep = 0
        self._apply(iteration, self.history)
        if self.replay_group:
            self.world.provoke_fault(0.4, (1, 2, 2, 4))  # while others are one iteration behind
        if self.content.iteration == self.replay_until:
            self._end_replay()
        return True

    def _replay_due(self, state: State) -> bool:
        return self.order(state) == WorkerOrder.EXECUTE and state.generation == self.log_generation

    def _average_gradients(self, iteration: int) -> bool:
        """Without replicas, there is nothing to average."""
        return True

    def _replay_from(self, peer: int, iteration: int) -> bool:
        """Receive from a neighbour if it is in the replay group, otherwise read its log."""
        if peer in self.replay_group:
            return self._recv_and_check(peer, iteration)
        assert self.content is not None
        entry = self.world.logged(peer, self.rank, iteration, self.log_since)
        if entry == "away" and self._replay_due(self.view):
            self.world.seen["waited for a log"] += 1
            return False  # until the replay is cancelled, or the peer answers again
        if isinstance(entry, str):
            due = self._replay_due(self.world.states[-1])
            if entry == "missing" and due:
                raise Violation(f"{self} needs iteration {iteration} of rank {peer}'s log: {entry}")
            return self._abort_replay(f"rank {peer}'s log is {entry}")
        if (entry.chain, entry.history) != (self.content.chain, self.history):
            return self._diverged(peer)
        return True

    def _abort_replay(self, reason: str) -> bool:
        """The worker keeps ``replaying``, as in the executor, because its state is behind the others'."""
        self.abandon_step()
        self._cancel_replay()
        self.append(ev.ReplayFailed(rank=self.rank, generation=self.log_generation, reason=reason))
        return False

    def _diverged(self, peer: int) -> bool:
        raise Violation(f"{self} replays messages of another history, from rank {peer}")

    def _replay_to(self, peer: int, iteration: int) -> bool:
        """Send to a member of the replay group. A live neighbour has the message already: drop it."""
        assert self.content is not None
        return peer not in self.replay_group or self._send(peer, iteration, self.content.chain, self.history)

    def _end_replay(self) -> None:
        """The state is at the consensus iteration. The replay group may still receive what was sent."""
        if self.replay_group:
            self.world.seen["replayed jointly"] += 1
            self.world.provoke_fault(0.6, (1, 2, 3))  # before the others are done
        self.detach_from_group()
        self.replaying, self.mode = False, Mode.RECOVER
        self.append(ev.WorkerReady(rank=self.rank, generation=self.log_generation, replayed=1))
