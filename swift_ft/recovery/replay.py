"""Messages in a step: logged when live, served and dropped in a replay (paper §5.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from swift_ft.determinism import derive_seed, seed_torch
from swift_ft.errors import DivergenceError
from swift_ft.logging import (
    Direction,
    LogReader,
    MessageKey,
    MessageLog,
    checksum_of,
    copy_into,
)
from swift_ft.logging.record import version_of
from swift_ft.traffic import Message

__all__ = ["LoggedTraffic"]


class SentInside:
    """What a worker sent to others in its group, in the iteration that runs and in the one before it.

    A stage that is ahead serves that iteration once more, to neighbours in its group, too. References are
    kept, for a little longer than the schedule itself keeps them; on a device memory is too dear for that.
    """

    def __init__(self) -> None:
        self._sent: dict[MessageKey, tuple[torch.Tensor, int]] = {}
        self._missing: set[int] = set()  # iterations

    def keep(self, key: MessageKey, tensor: torch.Tensor) -> None:
        """A message is sent."""
        if tensor.device.type == "cpu":
            tensor = tensor.detach()
            self._sent[key] = (tensor, version_of(tensor))
        else:
            self._missing.add(key.iteration)

    def begin(self, iteration: int) -> None:
        """An iteration begins: what was sent before the last one can go."""
        self._sent = {key: kept for key, kept in self._sent.items() if key.iteration >= iteration - 1}
        self._missing = {missing for missing in self._missing if missing >= iteration - 1}

    def has_all_of(self, iteration: int) -> bool:
        """Whether nothing is missing, and nothing was changed since."""
        changed = (
            key.iteration for key, (tensor, version) in self._sent.items() if version_of(tensor) != version
        )
        return iteration not in {*self._missing, *changed}

    def get(self, key: MessageKey) -> torch.Tensor | None:
        """A message; None if it was not sent inside the group."""
        return self._sent[key][0] if key in self._sent else None


@dataclass(slots=True)
class LoggedTraffic:
    """Decides about each message of the pipeline (:class:`swift_ft.traffic.Traffic`).

    A sender keeps what it sends; a receiver keeps the checksum of what it got. A replay logs again what it
    regenerates, so that the log is whole when the next machine is lost, and compares it with what the
    receivers got from the original.

    Attributes:
        rank: this worker.
        workers: workers per machine.
        groups: by machine; messages inside a group are not logged.
        seed: of the run.
        log: where messages go.
        on_compute: told before each computation (faults of tests).
        replica: of this pipeline; replicas draw different numbers.
        iteration: the one that is running.
        source: what a replay reads; None when live.
        portion: the workers that replay jointly with this one: messages between them go their usual way.
        sent: payload bytes to each machine in the iteration that runs.
        inside: what stayed inside the group, and so is in no log.
        inexact_from: a replay adds gradients up in another order than the original did, so that from this
            iteration on it sends other bytes; None where it sends the same.
        expected: while an earlier iteration is served, the checksum that came with a key before.
    """

    rank: int
    workers: int
    groups: Sequence[int]
    seed: int
    log: MessageLog
    on_compute: Callable[[int, int, Direction], None]
    replica: int = 0
    iteration: int = 0
    source: LogReader | None = None
    portion: tuple[int, ...] = ()
    sent: Counter[int] = field(default_factory=Counter)
    inside: SentInside = field(default_factory=SentInside)
    inexact_from: int | None = None
    expected: Callable[[MessageKey], int | None] | None = None

    def sending(self, message: Message) -> bool:
        """Log it; in a replay compare it and drop it."""
        self.sent[message.peer // self.workers] += message.tensor.nbytes
        if self.inexact_from is not None and self.iteration >= self.inexact_from:
            return False  # receivers have used what came from the original: only that may be in the log
        if self._crosses(message):
            self.log.sent(message.key, message.tensor)
        else:
            self.inside.keep(message.key, message.tensor)
        if self.source is None or message.peer in self.portion:
            return True
        self._compare(
            message, self.source.receipt(message.key), "the receiver got other bytes from the original"
        )
        return False

    def receiving(self, message: Message) -> bool:
        """In a replay fill the buffer from the log."""
        if self._crosses(message):
            self.log.overwriting(message.tensor)
        if self.source is None or message.peer in self.portion:
            return True
        copy_into(self.source.message(message.key), message.tensor)
        return False

    def waiting(self) -> None:
        """The bubble is when the log's own work is done."""
        self.log.bubble_begins()

    def received(self, message: Message) -> None:
        """Keep the checksum; while serving, also compare with what came before."""
        self.log.bubble_ends()
        if self.expected is not None:
            self._compare(message, self.expected(message.key), "other bytes came before")
        if self._crosses(message):
            self.log.received(message.key, message.tensor)

    def received_elsewhere(self, message: Message, checksum: int) -> None:
        """Keep the checksum, which a helper has computed."""
        if self._crosses(message):
            self.log.received_elsewhere(message.key, checksum, message.tensor)

    def computing(self, stage: int, microbatch: int, direction: Direction) -> None:
        """Derive the random state, so that a replay on any worker draws the same numbers."""
        if direction == Direction.FORWARD:
            seed_torch(derive_seed(self.seed, self.iteration, stage, microbatch, self.replica))
        self.on_compute(self.iteration, microbatch, direction)

    def _crosses(self, message: Message) -> bool:
        return self.groups[message.peer // self.workers] != self.groups[self.rank // self.workers]

    def _compare(self, message: Message, expected: int | None, why: str) -> None:
        if expected is None:
            return  # the original had not sent it yet
        if checksum_of(message.tensor) != expected:
            raise DivergenceError(
                f"The replay diverged at {message.key}: {why}. The computation is not deterministic; "
                "swift_ft.deterministic() may help.",
                key=message.key,
            )
