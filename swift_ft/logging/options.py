"""Options of a log: budgets, tiers, packing."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from swift_ft.storage.store import Store


class Ship(StrEnum):
    """When segments are uploaded from the local disk to the store."""

    ALWAYS = "always"
    """As soon as they are complete."""
    ON_FAILURE = "on-failure"
    """After a failure; and at the end, where the logs stay."""


class Compress(StrEnum):
    """The choice of when payloads are packed."""

    AUTO = "auto"
    """If measurements show that the store takes fewer bytes per second than a core packs."""
    NEVER = "never"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class LogBudget:
    """Limits for the log of one machine, which its workers share evenly.

    Attributes:
        memory_bytes: limit for messages that wait to be written, page-locked buffers included. At the limit
            senders wait.
        disk_bytes: limit for segments on the tier that is written to: the local disk if there are two tiers,
            else the store. None for no limit. When it is nearly used up, an early checkpoint makes older
            segments deletable. At the limit senders wait.
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
    """The options of one worker's log.

    Attributes:
        budget: limits for memory and disk. A message larger than the memory limit is admitted alone.
        segment_bytes: a segment is closed when it reaches this size.
        stall_timeout_s: longest wait of a sender for room, and of the writer for room in its disk budget.
        outage_patience_s: how long the writer waits for a disk that is full, not writable, or gone.
        ship: when segments are uploaded from the local disk to the store, if there are two tiers.
        local: folder for the local tier. A store behind a network always has a local tier, by default among
            the system's temporary files. Any other store has one only if this is given.
        compress: whether payloads are packed as :func:`swift_ft.logging.format.codec.codec_for` says.
    """

    budget: LogBudget = field(default_factory=LogBudget)
    segment_bytes: int = 64 << 20
    stall_timeout_s: float = 600.0
    ship: Ship = Ship.ALWAYS
    local: Path | None = None
    compress: Compress = Compress.NEVER
    outage_patience_s: float = 30.0

    def two_tiers(self, store: Store) -> bool:
        """Whether segments are written to the local disk first."""
        return store.remote or self.local is not None
