"""A simulated pipeline that loses neighbouring machines at once, and whose joint replays are interrupted.

The first loss comes while all workers train, some iterations after a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swift_ft.testing.simulation.job import SimulatedJob

_FAULTS = {
    "kill_neighbours": 8,
    "kill_machine": 4,
    "kill_worker": 4,
    "freeze_machine": 2,
    "freeze_worker": 1,
    "false_alarm": 1,
    "break_network": 10,
    "corrupt_log": 1,
    "diverge": 1,
    "pass_deadline_early": 1,
}


class AdjacentLossesJob(SimulatedJob):
    """One run; see :class:`SimulatedJob`."""

    patience = 1.0

    def __init__(
        self, seed: int, machines: int, workers: int = 1, *, trace: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(seed, machines, workers, trace=trace, faults=_FAULTS)
        self.settings.checkpoint_every = self.rng.choice((3, 4, 9))
        self.fault_timing.budget = self.rng.choice((1, 2, 2, 3, 3, 4))
        self.max_replay_shards = (1, 1, 2, 8)[seed % 4]

    def provoke_fault(self, chance: float, delays: Sequence[int]) -> None:
        """Faults strike eight times as often during joint replays."""
        joint = any(worker.replay_group for worker in self.workers)
        super().provoke_fault(chance if joint else chance / 8, delays)
