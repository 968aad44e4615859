"""A simulated worker's connections: with all others while live, with its portion in a joint replay.

What breaks on one worker breaks on its neighbours when it lets go of the group, and so on.
"""

from __future__ import annotations

from enum import Enum, auto

from simulated_process import Process
from simulated_store import Violation

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State

__all__ = ["Connected", "Mode"]


class Mode(Enum):
    """Where the training thread is."""

    BOOT = auto()
    RECOVER = auto()
    GATHER = auto()
    REPLAY = auto()
    HELP = auto()
    JOIN = auto()
    TRANSFER = auto()
    SERVE = auto()
    RUN = auto()
    CONFIRM = auto()
    FINISHING = auto()
    BARE = auto()


class Connected(Process):
    """A process that sends and receives.

    Attributes:
        mode: what its training thread does.
        stage: how far the step is that it does.
        history: names the history in which it computes.
    """

    mode = Mode.BOOT
    stage = 0
    history = 0

    def broken(self) -> None:
        """Communication failed: let go of the group, then wait for the word about who died."""
        self.abandon_step()
        generation = self.running
        self.leave_group()
        self.running = generation  # what confirm_loss() asks about
        self.mode = Mode.CONFIRM

    def abandon_step(self) -> None:
        """Put back what a step changes before it is complete; nothing, here."""
        self.stage = 0

    def _confirm(self, state: State) -> bool:
        if not self.disturbed(state):
            return False
        self.running, self.mode = None, Mode.RECOVER
        return True

    def interrupt(self) -> None:
        """The deadline of confirm_loss() passed."""
        assert self.running is not None
        self.tell(ev.Interrupted(self.rank, self.running, "the network broke"))

    def _send(self, peer: int, iteration: int, chain: int, history: int) -> bool:
        group = self.group
        assert group is not None
        lost = peer in group.gone and self.sim.rng.random() < 0.5  # else the kernel still takes it
        if group.broken or lost or self.disturbed(self.view):
            self.broken()
            return False
        group.mail[self.rank, peer, iteration] = (chain, history)
        return True

    def _receive(self, peer: int, iteration: int) -> tuple[int, int] | None:
        group = self.group
        assert group is not None
        if group.broken or self.disturbed(self.view):
            self.broken()
            return None
        mail = group.mail.get((peer, self.rank, iteration))
        if peer in group.gone and (mail is None or self.sim.rng.random() < 0.3):
            self.broken()  # with the connection, what was on its way may be lost
            return None
        return mail

    def _take(self, peer: int, iteration: int) -> bool:
        """Receive, and see that it comes from a state of the same history."""
        mail = self._receive(peer, iteration)
        assert self.content is not None
        if mail is not None and mail != (self.content.chain, self.history):
            raise Violation(f"{self} got a message of another history from rank {peer}")
        return mail is not None
