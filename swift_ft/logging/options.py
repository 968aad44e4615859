"""How a log is written: budgets, tiers, packing."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from swift_ft.logging.store import Store

__all__ = ["Compress", "LogBudget", "LogOptions", "Ship"]


class Ship(StrEnum):
    """When segments go from the local disk to the store."""

    ALWAYS = "always"
    """As soon as they are complete."""
    ON_FAILURE = "on-failure"
    """When the log is flushed: after a failure, and at the end."""


class Compress(StrEnum):
    """Whether payloads are packed."""

    AUTO = "auto"
    """Where the store was measured to take fewer bytes a second than a core packs."""
    NEVER = "never"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class LogBudget:
    """What the log of one machine may take; its workers share it evenly.

    Attributes:
        memory_bytes: messages that wait to be written, page-locked buffers included. At this limit senders
            wait.
        disk_bytes: segments on the tier that is written to: the local disk where there are two tiers, else
            the store. None for no limit. When it is nearly used up a checkpoint is taken early, which lets
            older segments go; at the limit senders wait.
    """

    memory_bytes: int = 256 << 20
    disk_bytes: int | None = None

    def of_worker(self, workers: int) -> LogBudget:
        """The share of one of a machine's workers."""
        if workers == 1:
            return self
        disk = self.disk_bytes // workers if self.disk_bytes is not None else None
        return LogBudget(self.memory_bytes // workers, disk)


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How one worker's log is written.

    Attributes:
        budget: what it may take. A message larger than the memory is admitted alone.
        segment_bytes: a segment is closed when it is as large as this.
        stall_timeout_s: how long a sender waits for room, and the writer for a disk that is full or must not
            be written, before they give up.
        ship: when segments go from the local disk to the store, where there are two tiers.
        local: folder for the local tier. A store behind a network has one in any case, by default among the
            system's temporary files; any other has one if this is given.
        compress: whether payloads are packed as :func:`swift_ft.logging.codec.codec_for` says.
    """

    budget: LogBudget = field(default_factory=LogBudget)
    segment_bytes: int = 64 << 20
    stall_timeout_s: float = 600.0
    ship: Ship = Ship.ALWAYS
    local: Path | None = None
    compress: Compress = Compress.NEVER

    def two_tiers(self, store: Store) -> bool:
        """Whether segments are written to the local disk first."""
        return store.remote or self.local is not None
