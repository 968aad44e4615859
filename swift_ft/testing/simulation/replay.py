"""A simulated worker whose state is rebuilt: it loads its checkpoint, and replays alone or with others.

Workers that replay jointly are connected as in a live pipeline: a message is available to its receiver once
it is sent, and one worker may complete an iteration a little before another. All other messages are read from
logs. A parallel replay needs all its members, helpers too, in every iteration.
"""

from __future__ import annotations

from swift_ft.errors import DamagedCheckpointError, RecoveryError
from swift_ft.recovery import events as ev
from swift_ft.recovery.helpers import ParallelReplay
from swift_ft.recovery.job_state import State
from swift_ft.recovery.orders import WorkerOrder
from swift_ft.recovery.plan import Task
from swift_ft.recovery.worlds import Change
from swift_ft.testing.simulation.connection import ConnectedProcess, Mode, Pending, Ticks
from swift_ft.testing.simulation.store import Content, Violation
from swift_ft.testing.simulation.world import Offer

_HANDOVER_FAILS = 0.01
"""The chance that a worker cannot offer its state, or take one."""


class ReplayingProcess(ConnectedProcess):
    """A worker that does its task of a plan: it loads and replays.

    Attributes:
        replaying: its state is being replayed.
        parallel_replay: the replay that it takes part in, as an owner or as a helper.
        replay_until: iterations that its state will have completed after the replay.
        completes_alone: a replay completes an iteration that others have completed.
    """

    replaying = False
    parallel_replay: ParallelReplay | None = None
    replay_until = 0
    completes_alone = False
    _acted = True
    _helped = False
    _step_done = False
    _offered: tuple[str, ...] = ()

    # ----------------------------------------------------------------------------------------- loading

    def load(self, state: State, task: Task) -> None:
        """Load this worker's part of a checkpoint.

        Raises:
            DamagedCheckpointError: it is damaged.
            RecoveryError: it cannot be read.
        """
        assert task.load is not None
        self.content = None
        if self.world.store.is_damaged(task.load, self.rank):
            raise DamagedCheckpointError("a bit flipped", iteration=task.load)
        may_fail = self.world.store.failing_loads > 0
        self.content = self.world.store.load(task.load, self.rank)
        if self.content is None:
            if not may_fail and not self._outdated(state):
                raise Violation(f"{self} cannot load checkpoint {task.load}, which counts as committed")
            raise RecoveryError("the checkpoint cannot be read")

    # ---------------------------------------------------------------------------- from world to world

    def offer(self, state: State, iteration: int) -> ev.Event:
        """Offer its state to the next world.

        Raises:
            RecoveryError: it cannot.
        """
        change = state.worlds.change
        assert change is not None
        rank, content = self._to_offer(change, iteration)
        if content is None or content.iteration != iteration:
            raise Violation(f"{self} offers {content} as a state of iteration {iteration}")
        if self.world.rng.random() < _HANDOVER_FAILS:
            raise RecoveryError("it cannot listen at its address")
        address = f"{change.world.number}/rank-{rank}"
        self._offered = (*self._offered, address)
        self.world.offers[address] = Offer(content)
        return ev.StateOffered(
            rank=rank,
            generation=state.generation,
            iteration=iteration,
            address=address,
            digest="",
            holder=self.rank if change.copies else None,
        )

    def _to_offer(self, change: Change, iteration: int) -> tuple[int, Content | None]:
        """The worker whose state it offers, and that state."""
        return self.rank, self.content

    def withdraw(self) -> None:
        """Offer nothing any more."""
        for address in self._offered:
            self.world.offers[address].served = False
        self._offered = ()

    def take(self, state: State) -> Ticks[ev.Event]:
        """Take a state from all that is offered, one worker's after the other.

        Raises:
            RecoveryError: one of them is gone.
        """
        change, pending = state.worlds.change, state.layouts.pending
        assert change is not None
        assert pending is not None
        taken: set[Content] = set()
        for _, offered in sorted(change.offered.items()):
            offer = self.world.offers[offered.address]
            if not offer.served or self.world.rng.random() < _HANDOVER_FAILS:
                raise RecoveryError(f"what {offered.machine} offers cannot be read")
            taken.add(offer.content)
            self.world.provoke_fault(0.1, (1, 2, 4))
            yield Pending.ACTED
        self.content = taken.pop()
        if taken or self.content.iteration != pending.iteration:
            raise Violation(f"{self} takes {self.content} at iteration {pending.iteration}, beside {taken}")
        return ev.StateTaken(rank=self.rank, world=self.world_number)

    # ---------------------------------------------------------------------------------- with others

    def begin_replay(self, state: State, task: Task, shared: ParallelReplay | None) -> Ticks[bool]:
        """Connect with those that replay, too. False if another generation is due."""
        self.parallel_replay = shared
        self.replaying, self.replay_until = True, task.replay_until
        self.history = self._history_of(state)
        self.replay_group = task.replay_group
        if task.replay_group or shared is not None:
            return (yield from self._connect(state, self.content))
        return True

    def help(self, state: State, shared: ParallelReplay) -> Ticks[bool]:
        """Compute for those that replay. False if that was interrupted."""
        self.parallel_replay, self._helped = shared, False
        if not (yield from self._connect(state, None)):
            return False
        yield from self.stay(Mode.HELP, self._help)
        if self.mode == Mode.CONFIRM:
            yield from self.confirm_loss()
        return self._helped

    def _connect(self, state: State, content: Content | None) -> Ticks[bool]:
        """Connect with all members of the replay. A helper begins without content."""
        shared = self.parallel_replay
        self.active_generation, self.expected_order = state.generation, WorkerOrder.EXECUTE
        self.replay_members = shared.members if shared is not None else self.replay_group
        self.world.group(state.generation, replay=True).ready[self.rank] = content
        yield from self.write(ev.GroupAwaited(rank=self.rank, generation=state.generation))
        yield from self.stay(Mode.GATHER, self._gather)
        if self.mode == Mode.CONFIRM:
            yield from self.confirm_loss()
        return self.mode == Mode.FORMED

    def _history_of(self, state: State) -> int:
        """The name of the history that the job continues in."""
        return hash((state.checkpoints.epoch, state.checkpoints.log_since))

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
        self.mode = Mode.FORMED
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
        self._helped, self.mode = True, Mode.RECOVER
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
        if self.substep == 0 and self.world.rng.random() < 0.5:
            return True  # computing takes a while
        assert self.content is not None
        iteration = self.content.iteration
        while self.substep < 4:
            peer = self.before if self.substep in (0, 3) else self.after
            exchange = self._replay_from if self.substep % 2 == 0 else self._replay_to
            if peer is not None and not exchange(peer, iteration):
                return self.mode != Mode.REPLAY or self.failure is not None
            self.substep += 1
            if self.replay_group:
                return True
        if not self._average_gradients(iteration):
            return self._acted
        if not self._receive_help(iteration):
            return True
        self._apply(iteration, self.history)
        self._step_done = True
        if self.replay_group:
            self.world.provoke_fault(0.4, (1, 2, 2, 4))  # while others are one iteration behind
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
        """The state stays behind the others'."""
        self.failure = RecoveryError(reason)
        return False

    def _diverged(self, peer: int) -> bool:
        raise Violation(f"{self} replays messages of another history, from rank {peer}")

    def _replay_to(self, peer: int, iteration: int) -> bool:
        """Send to a member of the replay group. A live neighbour has the message already: drop it."""
        assert self.content is not None
        return peer not in self.replay_group or self._send(peer, iteration, self.content.chain, self.history)

    def end_replay(self) -> None:
        """The state is at the consensus iteration, or it stays where it is."""
        if self.replaying and self.replay_group and self.content is not None:
            at_end = self.content.iteration == self.replay_until
            self.world.seen["replayed jointly"] += at_end
            self.world.provoke_fault(0.6 * at_end, (1, 2, 3))  # before the others are done
        self.replaying = False

    def move_layers(self, state: State) -> Ticks[bool]:
        """No plan asks for it."""
        raise Violation(f"{self} is to move layers, and has none")
