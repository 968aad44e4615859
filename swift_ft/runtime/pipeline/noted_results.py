"""Noted results of functions between two steps, in the log, for a replay whose job is gone.

A live replay finds it in the rendezvous store, which ends with the job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash

from swift_ft.errors import LogMissingError
from swift_ft.logging import Direction, MessageKey, MessageLog
from swift_ft.runtime.pipeline.script_communication import Absence

_PLACE = xxhash.xxh3_64_intdigest(b"between two steps") >> 1
"""The number in a key where other keys have an operation's group; an int64."""


@dataclass(frozen=True, slots=True)
class NotedResults:
    """The results in a worker's log, and in those that its replay reads.

    Attributes:
        rank: this worker.
        log: this worker's.
        absence: whose logs a replay reads; None outside of one.
    """

    rank: int
    log: MessageLog
    absence: Callable[[], Absence | None]

    def note(self, iteration: int, position: int, result: str) -> None:
        """Log a result, after this many complete iterations; ``position`` counts those that are due."""
        if self.log.writer is not None:
            content = torch.frombuffer(bytearray(result.encode()), dtype=torch.uint8)
            self.log.sent(_key(iteration, position, self.rank), content)

    def read(self, iteration: int, position: int) -> str | None:
        """A result from the log of a worker next to this one. None if none has it."""
        absence = self.absence()
        for rank in absence.near if absence is not None else ():
            assert absence is not None
            try:
                content = absence.read(rank).read(_key(iteration, position, rank))
            except LogMissingError:
                continue
            return bytes(content.tolist()).decode()
        return None


def _key(iteration: int, position: int, rank: int) -> MessageKey:
    """Like an operation of the script in the iteration before."""
    return MessageKey(iteration - 1, position, Direction.SCRIPT, _PLACE, rank, 0)
