"""The connections of a simulated worker: with all others while live, with its replay group in a joint replay.

A worker whose connection breaks leaves the group, which breaks its neighbours' connections, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import Enum, auto
from typing import TypeAlias, TypeVar

from swift_ft.errors import RecoveryError
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.orders import WorkerOrder
from swift_ft.recovery.plan import Plan
from swift_ft.runtime.worker.core import WorkerCore
from swift_ft.testing.simulation.process import Process
from swift_ft.testing.simulation.store import Violation


class Mode(Enum):
    """The phase that a worker's training thread is in."""

    BOOT = auto()
    RECOVER = auto()
    GATHER = auto()
    REPLAY = auto()
    HELP = auto()
    JOIN = auto()
    FORMED = auto()
    TRANSFER = auto()
    RESEND = auto()
    EQUAL = auto()
    RUN = auto()
    STOPPED = auto()
    MOVE = auto()
    CONFIRM = auto()
    FINISHING = auto()
    SESSIONLESS = auto()


class Pending(Enum):
    """A call that has not returned yet."""

    IDLE = auto()
    """It waits."""
    ACTED = auto()
    """It has done a part of it."""


T = TypeVar("T")
Ticks: TypeAlias = Generator[Pending, None, T]
"""A call that takes several steps of the simulation, and returns a ``T``."""


class ConnectedProcess(Process):
    """A process that sends and receives.

    Attributes:
        mode: what its training thread does.
        substep: how far it is in its current step.
        history: the name of the history in which it computes.
        core: decides what it does.
        plan: the plan of the generation that it last joined.
        failure: why its step, or an exchange, is impossible, if so.
    """

    core: WorkerCore
    plan: Plan | None = None
    failure: RecoveryError | None = None

    mode = Mode.BOOT
    substep = 0
    history = 0

    def fail_communication(self) -> None:
        """Communication failed: leave the group. What was under way notices, and is interrupted."""
        generation = self.active_generation
        self.leave_group()
        self.active_generation = generation  # confirming a loss asks whether this generation is over
        self.mode = Mode.CONFIRM

    def confirm_loss(self) -> Ticks[None]:
        """Wait until the journal says which machine is lost."""
        if self.mode != Mode.CONFIRM:
            self.fail_communication()
        while not self.generation_over(self.view):
            yield Pending.IDLE
        self.active_generation, self.mode = None, Mode.RECOVER

    def write(self, event: ev.Event) -> Ticks[State]:
        """Append an event to the journal, and wait until it is there."""
        self.append(event)
        if self._awaits_answer:
            yield Pending.ACTED
        while self._awaits_answer:
            yield Pending.IDLE
        return self.view

    @property
    def _awaits_answer(self) -> bool:
        return self.unwritten_event is not None or bool(self.unanswered) or not self.alive

    def stay(self, mode: Mode, act: Callable[[State], bool]) -> Ticks[None]:
        """Act again and again, until that has led to another mode, or somebody else has."""
        self.mode = mode
        while self.mode == mode:
            acted = act(self.view)
            if self.mode == mode:  # one that has ended is never asked to go on
                yield Pending.ACTED if acted else Pending.IDLE

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

    # ---------------------------------------------------------------------------------------- its group

    def enter(self, generation: int) -> Ticks[bool]:
        """Form the group of a generation."""
        self.joining_generation, self.expected_order, self.failure = generation, WorkerOrder.RUN, None
        yield from self.stay(Mode.JOIN, self._join)
        if self.mode == Mode.CONFIRM:
            yield from self.confirm_loss()
        return self.mode == Mode.FORMED

    def _join(self, state: State) -> bool:
        """Form the group, together with all other workers. An abort ends the wait for them."""
        generation = self.joining_generation
        assert generation is not None
        assert self.plan is not None
        group = self.world.group(generation)
        if self.rank not in group.joined:
            if self._is_to_leave(state, generation):
                self.detach_from_group()
                self.mode = Mode.RECOVER
                return True
            group.joined.add(self.rank)
            return True
        if len(group.joined) < state.world_size and not group.gone and not group.broken:
            if not self._is_to_leave(state, generation):
                return False  # until the generation is over, or a deadline
            self.leave_group()
            self.mode = Mode.RECOVER
            return True
        self.active_generation, self.joining_generation = generation, None
        if len(group.joined) < state.world_size or group.gone or group.broken:
            self.fail_communication()
            return True
        if self.generation_over(state):
            self.leave_group()
            self.mode = Mode.RECOVER
            return True
        self.world.check_formed(generation, self.plan)
        self.world.shapes_known = True
        self.mode = Mode.FORMED
        return True

    def _is_to_leave(self, state: State, generation: int) -> bool:
        """Whether the group that it is about to form, or forms, is not needed any more."""
        return state.generation != generation or self.order(state) != WorkerOrder.RUN
