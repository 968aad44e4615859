"""A simulated worker whose state is rebuilt: it loads its checkpoint, and replays alone or with others.

Who replays jointly is connected with the others of its portion as in a live pipeline: what one of them sends
is there for its neighbour when it was sent, and one may be done with an iteration a little before another.
All other messages are read from logs. A shared replay needs all its members, helpers too, in every iteration.
"""

from __future__ import annotations

from simulated_connection import Connected, Mode
from simulated_store import Content, Violation

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.orders import WorkerOrder
from swift_ft.recovery.sharing import SharedReplay

__all__ = ["Rebuilt"]


class Rebuilt(Connected):
    """What a worker does with its task of a plan.

    Attributes:
        dirty: why its state is neither before nor after an iteration, if so.
        source: its state is being replayed.
        shared: the replay in which helpers take part, or it helps.
        until: iterations that its state will have completed then.
    """

    dirty: str | None = None
    source = False
    shared: SharedReplay | None = None
    until = 0
    _acted = True

    def _execute(self, state: State) -> None:
        assert state.plan is not None
        task, self.shared = state.plan.tasks[self.rank], state.plan.shared_by(self.rank)
        if self._helps():
            self._connect(state, None)
            return
        if task.load is not None:
            allowed = self.sim.store.failing_loads > 0
            loaded = self.sim.store.load(task.load, self.rank)
            if loaded is None:
                if not allowed and not self._outdated(state):
                    raise Violation(f"{self} cannot load checkpoint {task.load}, which counts as committed")
                self._cannot(state.generation, "the checkpoint cannot be read")
                return
            self.content = loaded
        if self.content is None or self.content.iteration != task.begin:
            raise Violation(f"{self} is to begin at iteration {task.begin} with {self.content}")
        self.dirty = None
        self._open_log(state)
        if task.begin >= task.replay_until:
            self.tell(ev.Ready(self.rank, state.generation))
            return
        self.source, self.until, self.stage, self.mode = True, task.replay_until, 0, Mode.REPLAY
        self.history = self._history_of(state)
        self.portion = task.portion
        if task.portion or self.shared is not None:
            self._connect(state, self.content)

    def _helps(self) -> bool:
        return self.shared is not None and self.rank in self.shared.helpers

    def _connect(self, state: State, content: Content | None) -> None:
        """Begin to gather with all that replay jointly, or share a replay: a helper begins with nothing."""
        self.running, self.meanwhile = state.generation, WorkerOrder.EXECUTE
        self.members = self.shared.members if self.shared is not None else self.portion
        self.mode = Mode.GATHER
        self.sim.group(state.generation, replay=True).ready[self.rank] = content

    def _history_of(self, state: State) -> int:
        """The name of the history that a state of the job goes on with."""
        return hash((state.epoch, state.log_since))

    def _cannot(self, generation: int, reason: str) -> None:
        self.source, self.mode = False, Mode.RECOVER
        self.tell(ev.CannotReplay(self.rank, generation, reason))

    # ------------------------------------------------------------------------------------------- jointly

    def _gather(self, state: State) -> bool:
        """Wait until all members are about to replay, or to help, then be connected with them."""
        group = self.group
        assert group is not None
        members = {*self.members}
        if self.rank not in group.joined:
            if self.disturbed(state):
                self._call_off()
                return True
            if not group.ready.keys() >= members:
                return False  # as long as those who hold allow
            group.joined.add(self.rank)
            return True
        if group.broken or group.gone & members:
            self.broken()
            return True
        if not group.joined >= members:
            return False  # until a deadline
        if self.disturbed(state):
            self._call_off()
            return True
        owners = members if self.shared is None else {*self.shared.owners}
        if len({group.ready[rank] for rank in owners}) > 1:
            raise Violation(f"{self} is to replay with {owners}, and they begin with {group.ready}")
        self.mode = Mode.HELP if self._helps() else Mode.REPLAY
        self.sim.tempt(0.4, (1, 4, 10, 20, 40))
        return True

    def _help(self, state: State) -> bool:
        """Compute for the owners, until each has said that its last iteration is done."""
        group, shared = self.group, self.shared
        assert group is not None
        assert shared is not None
        if self.disturbed(state):
            self._call_off()
            return True
        if group.broken or group.gone & {*shared.members}:
            self.broken()
            return True
        if self.sim.rng.random() < 0.01:
            self.sim.seen["could not help"] += 1
            self._call_off()
            self.tell(ev.CannotHelp(self.rank, state.generation, "there is no room"))
            return True
        if any((owner, self.rank, shared.until - 1) not in group.mail for owner in shared.owners):
            return False
        self.sim.seen["helped"] += 1
        self.keep_group()
        self.mode = Mode.RECOVER
        self.tell(ev.Ready(self.rank, state.generation))
        return True

    def _helped(self, iteration: int) -> bool:
        """What helpers have computed is here; False if one of them is gone."""
        group, shared = self.group, self.shared
        if shared is None:
            return True
        assert group is not None
        if group.broken or group.gone & {*shared.members}:
            self.broken()
            return False
        for helper in shared.helpers:
            group.mail[self.rank, helper, iteration] = (0, 0)
        return True

    def _call_off(self) -> None:
        """Another generation has begun. What was replayed so far is kept."""
        self.leave_group()
        self.mode = Mode.RECOVER

    # -------------------------------------------------------------------------------------- an iteration

    def _replay(self, state: State) -> bool:
        """One iteration, or in a joint replay a part of it."""
        if self.stage == 0:
            if not self._due(state):
                self._call_off()
                return True
            if self.sim.rng.random() < 0.5:
                return True  # it takes a while
        assert self.content is not None
        iteration = self.content.iteration
        while self.stage < 4:
            peer = self.before if self.stage in (0, 3) else self.after
            passed_on = self._replay_from if self.stage % 2 == 0 else self._replay_to
            if peer is not None and not passed_on(peer, iteration):
                return self.mode != Mode.REPLAY
            self.stage += 1
            if self.portion:
                return True
        if not self._average(iteration):
            return self._acted
        if not self._helped(iteration):
            return True
        self.stage = 0
        self._apply(iteration, self.history)
        if self.portion:
            self.sim.tempt(0.4, (1, 2, 2, 4))  # while others are one iteration behind
        if self.content.iteration == self.until:
            self._end_replay()
        return True

    def _due(self, state: State) -> bool:
        return self.order(state) == WorkerOrder.EXECUTE and state.generation == self.log_generation

    def _average(self, iteration: int) -> bool:
        """Without replicas, gradients are what they are."""
        return True

    def _replay_from(self, peer: int, iteration: int) -> bool:
        """What a neighbour sent: again by itself if it is one of the portion, else from its log."""
        if peer in self.portion:
            return self._take(peer, iteration)
        assert self.content is not None
        entry = self.sim.logged(peer, self.rank, iteration, self.log_since)
        if entry == "away" and self._due(self.view):
            self.sim.seen["waited for a log"] += 1
            return False  # until it is called off, or the peer is there again
        if isinstance(entry, str):
            due = self._due(self.sim.states[-1])
            if entry == "missing" and due:
                raise Violation(f"{self} needs iteration {iteration} of rank {peer}'s log: {entry}")
            return self._cannot_go_on(f"rank {peer}'s log is {entry}")
        if (entry.chain, entry.history) != (self.content.chain, self.history):
            return self._diverged(peer)
        return True

    def _cannot_go_on(self, reason: str) -> bool:
        """Replaying stays true, as in the executor: the state is not where the others are."""
        self.abandon_step()
        self._call_off()
        self.tell(ev.CannotReplay(self.rank, self.log_generation, reason))
        return False

    def _diverged(self, peer: int) -> bool:
        raise Violation(f"{self} replays messages of another history, from rank {peer}")

    def _replay_to(self, peer: int, iteration: int) -> bool:
        """What a living neighbour has got already is dropped."""
        assert self.content is not None
        return peer not in self.portion or self._send(peer, iteration, self.content.chain, self.history)

    def _end_replay(self) -> None:
        """The state stands at the consensus iteration. Others of the portion may still read what was sent."""
        self.flush()
        if self.portion:
            self.sim.seen["replayed jointly"] += 1
            self.sim.tempt(0.6, (1, 2, 3))  # while others are not
        self.keep_group()
        self.source, self.mode = False, Mode.RECOVER
        self.tell(ev.Ready(self.rank, self.log_generation, 1))
