"""Messages of a step: logged when live; read from the log, and not sent, in a replay (paper §5.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from swift_ft.determinism import UNLIKE_RESULT, derive_seed, seed_torch
from swift_ft.errors import DivergenceError
from swift_ft.faults.failpoints import Point, hit
from swift_ft.logging import (
    Direction,
    LogReader,
    MessageKey,
    MessageLog,
    checksum_of,
)
from swift_ft.torch_adapters.abortable_waits import ABORTED
from swift_ft.torch_adapters.pipelining.interceptor import Message
from swift_ft.torch_core import outputs
from swift_ft.torch_core.outputs import Output
from swift_ft.torch_core.tensors import version_of

_LAYER = -2
"""In seeds, where the ones of stages have a stage."""


class RetainedSends:
    """Messages that a worker sent inside its group, in the current iteration and in the one before it.

    A stage that is ahead resends an iteration to neighbours in its group, too, and those messages are in no
    log. The class holds references, a little longer than the schedule does. Tensors on a device are not
    retained, since device memory is scarce.
    """

    def __init__(self) -> None:
        self._sent: dict[MessageKey, tuple[torch.Tensor, int]] = {}
        self._missing: set[int] = set()  # iterations

    def keep(self, key: MessageKey, tensor: torch.Tensor) -> None:
        """Retain a message that is sent."""
        if tensor.device.type == "cpu":
            tensor = tensor.detach()
            self._sent[key] = (tensor, version_of(tensor))
        else:
            self._missing.add(key.iteration)

    def begin(self, iteration: int) -> None:
        """Begin an iteration, and drop the messages from before the previous one."""
        # A worker that is one iteration behind may need the previous one again (decision 25).
        self._sent = {key: kept for key, kept in self._sent.items() if key.iteration >= iteration - 1}
        self._missing = {missing for missing in self._missing if missing >= iteration - 1}

    def has_all_of(self, iteration: int) -> bool:
        """Whether no message of an iteration is missing, and none was changed since it was sent."""
        changed = (
            key.iteration for key, (tensor, version) in self._sent.items() if version_of(tensor) != version
        )
        return iteration not in {*self._missing, *changed}

    def get(self, key: MessageKey) -> torch.Tensor | None:
        """A retained message; None if it was not sent inside the group."""
        return self._sent[key][0] if key in self._sent else None


@dataclass(slots=True)
class LogInterceptor:
    """Decides for each message of the pipeline whether it is logged, sent, or read from the log.

    See :class:`swift_ft.torch_adapters.pipelining.interceptor.MessageInterceptor`.

    A sender logs what it sends; a receiver logs the checksum of what it receives. A replay logs the messages
    that it regenerates, so that the log is complete when the next machine is lost, and compares them with
    the checksums that the receivers logged.

    Attributes:
        rank: this worker.
        workers_per_machine: number of workers on each machine.
        recovery_groups: the group of each machine. Messages inside a group are not logged.
        log: where messages go.
        replica: number of this replica of the pipeline; replicas draw different random numbers.
        first_microbatch: its number among those of all replicas, if random numbers go by that.
        iteration: the current one.
        source: the logs that a replay reads; None when live.
        replay_group: workers that replay jointly with this one; messages between them are sent as usual.
        sent_bytes: payload bytes to each machine in the current iteration.
        retained_sends: messages inside the group, which are in no log.
        retains: whether they are kept, to be sent again.
        inexact_from: the iteration from which a replay's messages may differ from the original's, because it
            adds up gradients in another order; None if they are identical.
        expected: while an earlier iteration is resent, and in an audit, returns the checksum that was
            received with a key. An audit has one for each message that was logged.
        computing: the iteration and the microbatch that a stage computes; None outside of steps.
    """

    rank: int
    workers_per_machine: int
    recovery_groups: Sequence[int]
    seed: int
    log: MessageLog
    replica: int = 0
    first_microbatch: int = 0
    iteration: int = 0
    source: LogReader | None = None
    replay_group: tuple[int, ...] = ()
    sent_bytes: Counter[int] = field(default_factory=Counter)
    retained_sends: RetainedSends = field(default_factory=RetainedSends)
    retains: bool = True
    inexact_from: int | None = None
    expected: Callable[[MessageKey], int | None] | None = None
    computing: tuple[int, int] | None = None

    def on_send(self, message: Message) -> bool:
        """Log a message. In a replay, compare it and do not send it."""
        self.sent_bytes[message.peer // self.workers_per_machine] += message.tensor.nbytes
        if outputs.are_watched():
            outputs.show(Output(str(message.key), {"a message": message.tensor}))
        if self.inexact_from is not None and self.iteration >= self.inexact_from:
            return False  # receivers have used the original's message: only that one may be in the log
        if self._crosses(message):
            self.log.sent(message.key, message.tensor)
        elif self.retains:
            self.retained_sends.keep(message.key, message.tensor)
        if self.source is None or message.peer in self.replay_group:
            return True
        received = self.source.receipt if self.expected is None else self.expected
        self._compare(message, received, "the original sent different bytes")
        return False

    def on_recv(self, message: Message) -> bool:
        """In a replay, fill the buffer from the log."""
        if self._crosses(message):
            self.log.overwriting(message.tensor)
        if self.source is None or message.peer in self.replay_group:
            return True
        self.source.read_into(message.key, message.tensor)
        return False

    def on_wait(self) -> None:
        """Let the log do its own work in the bubble."""
        self.log.bubble_begins()

    def on_received(self, message: Message) -> None:
        """Log the checksum. Where it is known what the original has received, also compare it with that."""
        self.log.bubble_ends()
        if outputs.are_watched():
            outputs.show(Output(str(message.key), {"a message": message.tensor}, received=True))
        if self.expected is not None:
            self._compare(message, self.expected, "the original received different bytes")
        if self._crosses(message):
            self.log.received(message.key, message.tensor)

    def on_received_elsewhere(self, message: Message, checksum: int) -> None:
        """Log the checksum that a helper has computed."""
        if self._crosses(message):
            self.log.received_elsewhere(message.key, checksum, message.tensor)

    def on_compute(self, stage: int, microbatch: int, direction: Direction) -> None:
        """Derive the random state, so that a replay on any worker draws the same numbers."""
        number = self.first_microbatch + microbatch
        self.computing = self.iteration, number
        if direction == Direction.FORWARD:
            # From numbers alone, so that it does not matter which worker computes it, or when.
            seed_torch(derive_seed(self.seed, self.iteration, stage, number, self.replica))
        point = Point.FORWARD if direction == Direction.FORWARD else Point.BACKWARD
        hit(point, self.iteration, microbatch)

    def on_layer(self, layer: int) -> None:
        """Derive the random state for a layer of a LayerStack: it does not depend on the layer's stage."""
        if self.computing is not None:
            iteration, microbatch = self.computing
            seed_torch(derive_seed(self.seed, iteration, _LAYER, layer, microbatch, self.replica))

    def _crosses(self, message: Message) -> bool:
        return (
            self.recovery_groups[message.peer // self.workers_per_machine]
            != self.recovery_groups[self.rank // self.workers_per_machine]
        )

    def _compare(self, message: Message, received: Callable[[MessageKey], int | None], why: str) -> None:
        if not self._crosses(message) or (expected := received(message.key)) is None:
            return  # it is in no log, or the original had not sent it yet
        if (computed := checksum_of(message.tensor)) != expected:
            if self.log.in_doubt():
                raise RuntimeError(ABORTED)
            raise DivergenceError(
                f"The replay diverged at {message.key}: {why}. {UNLIKE_RESULT}.",
                key=message.key,
                computed_in=message.key.iteration,
                computed=computed,
            )
