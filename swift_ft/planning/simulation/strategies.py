"""The cost of each fault tolerance strategy, without failures and when a machine fails."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swift_ft.errors import UsageError
from swift_ft.planning.checks import check_not_negative


@dataclass(frozen=True)
class Strategy:
    """A fault tolerance strategy, as costs.

    Attributes:
        name: as it is printed.
        kind: ``rollback`` (all machines roll back to the last save), ``replication`` (nothing is lost while a
            replica lives, §4) or ``logging`` (only the lost part is replayed, §5).
        save_interval_s: seconds of training between two saves (checkpoint or snapshot); inf for none.
        save_stall_s: seconds that a save stalls training.
        restore_s: seconds to load the state from which recovery begins, or to undo and broadcast it.
        fallback_restore_s: seconds to load the global checkpoint when the strategy itself cannot recover.
        replay_factor: seconds of replay per lost second of training (logging).
        slowdown: training time added by the strategy at all times, as a share.
        extra_startup_s: seconds added to the cluster's start-up.
    """

    name: str
    kind: str
    save_interval_s: float
    save_stall_s: float = 0.0
    restore_s: float = 0.0
    fallback_restore_s: float = 0.0
    replay_factor: float = 1.0
    slowdown: float = 0.0
    extra_startup_s: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("rollback", "replication", "logging"):
            raise UsageError(f"strategy {self.name}: there is no kind {self.kind!r}")
        if not self.save_interval_s > 0:
            raise UsageError(f"strategy {self.name}: the save interval must be positive")
        times = ("save_stall_s", "restore_s", "fallback_restore_s", "extra_startup_s")
        costs = (*times, "replay_factor", "slowdown")
        check_not_negative({f"strategy {self.name}: {cost}": getattr(self, cost) for cost in costs})

    def saves(self, work_s: float) -> int:
        """The number of saves in a run of ``work_s`` seconds of training."""
        return 0 if math.isinf(self.save_interval_s) else math.floor(work_s / self.save_interval_s + 1e-9)

    def undisturbed_s(self, work_s: float) -> float:
        """Seconds that the run takes without failures: training, slowdown and stalls."""
        return work_s * (1 + self.slowdown) + self.saves(work_s) * self.save_stall_s


@dataclass(frozen=True)
class Cluster:
    """A cluster, by how its machines fail and are replaced.

    Attributes:
        machines: how many train.
        detection_s: from a failure to its detection.
        replacement_s: until a new machine is ready, without a spare.
        join_s: until its workers have joined the job.
        spares: idle machines that have joined already.
        spare_s: instead of ``replacement_s``, with a spare.
        repair_s: until a machine that failed is a spare again; inf for never.
        burst: the probability that a second machine fails with the first.
    """

    machines: int
    detection_s: float = 5.0
    replacement_s: float = 45.0
    join_s: float = 40.0
    spares: int = 0
    spare_s: float = 0.0
    repair_s: float = math.inf
    burst: float = 0.0

    def __post_init__(self) -> None:
        if self.machines < 1 or self.spares < 0:
            raise UsageError("a cluster needs at least one machine, and no negative number of spares")
        for name in ("detection_s", "replacement_s", "join_s", "spare_s", "repair_s"):
            value = getattr(self, name)
            if math.isnan(value) or value < 0 or (math.isinf(value) and name != "repair_s"):
                raise UsageError(f"{name} is {value}: it must be a length of time")
        if not 0 <= self.burst <= 1:
            raise UsageError(f"burst is {self.burst}: it is a probability, between 0 and 1")

    @property
    def startup_s(self) -> float:
        """Detection, replacement and join together, without a spare."""
        return self.detection_s + self.replacement_s + self.join_s
