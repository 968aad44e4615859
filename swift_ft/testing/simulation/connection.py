"""The connections of a simulated worker: with all others while live, with its replay group in a joint replay.

A worker whose connection breaks leaves the group, which breaks its neighbours' connections, and so on.
"""

from __future__ import annotations

from enum import Enum, auto

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.testing.simulation.process import Process
from swift_ft.testing.simulation.store import Violation

__all__ = ["ConnectedProcess", "Mode"]


class Mode(Enum):
    """Where the training thread is."""

    BOOT = auto()
    RECOVER = auto()
    GATHER = auto()
    REPLAY = auto()
    HELP = auto()
    JOIN = auto()
    TRANSFER = auto()
    RESEND = auto()
    RUN = auto()
    STOPPED = auto()
    MOVE = auto()
    CONFIRM = auto()
    FINISHING = auto()
    SESSIONLESS = auto()


class ConnectedProcess(Process):
    """A process that sends and receives.

    Attributes:
        mode: what its training thread does.
        substep: how far it is in its current step.
        history: the name of the history in which it computes.
    """

    mode = Mode.BOOT
    substep = 0
    history = 0

    def fail_communication(self) -> None:
        """Communication failed: leave the group, then wait until the journal says which machine is lost."""
        self.abandon_step()
        generation = self.active_generation
        self.leave_group()
        self.active_generation = generation  # confirming a loss asks whether this generation is over
        self.mode = Mode.CONFIRM

    def abandon_step(self) -> None:
        """Undo what an incomplete step changed. Here, that is nothing."""
        self.substep = 0

    def _confirm(self, state: State) -> bool:
        if not self.generation_over(state):
            return False
        self.active_generation, self.mode = None, Mode.RECOVER
        return True

    def report_communication_failure(self) -> None:
        """The deadline for the confirmation of a loss passed."""
        assert self.active_generation is not None
        self.append(
            ev.CommunicationFailed(
                rank=self.rank, generation=self.active_generation, reason="the network broke"
            )
        )

    def _send(self, peer: int, iteration: int, chain: int, history: int) -> bool:
        group = self.group
        assert group is not None
        lost = peer in group.gone and self.world.rng.random() < 0.5  # otherwise the kernel still accepts it
        if group.broken or lost or self.generation_over(self.view):
            self.fail_communication()
            return False
        group.mail[self.rank, peer, iteration] = (chain, history)
        return True

    def _recv(self, peer: int, iteration: int) -> tuple[int, int] | None:
        group = self.group
        assert group is not None
        if group.broken or self.generation_over(self.view):
            self.fail_communication()
            return None
        mail = group.mail.get((peer, self.rank, iteration))
        if peer in group.gone and (mail is None or self.world.rng.random() < 0.3):
            self.fail_communication()  # messages in flight may be lost with the connection
            return None
        return mail

    def _recv_and_check(self, peer: int, iteration: int) -> bool:
        """Receive, and check that the message comes from a state of the same history."""
        mail = self._recv(peer, iteration)
        assert self.content is not None
        if mail is not None and mail != (self.content.chain, self.history):
            raise Violation(f"{self} received a message of another history from rank {peer}")
        return mail is not None
