"""The simulated network in which neighbours are lost at once, and their joint replay is disturbed.

The first loss comes while everybody is at work, some iterations after a checkpoint: see `simulation.py`.

Run one seed again, and see its journal:

    python tests/unit/recovery/adjacent_simulation.py 4711 --shape 3x2
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a script: the modules beside this one are the same as for pytest
    sys.path.insert(0, str(Path(__file__).parent))

from simulated_command import main, run_seed
from simulation import Outcome, Simulation

__all__ = ["AdjacentSimulation", "simulate_adjacent"]

_FAULTS = {
    "kill_neighbours": 8,
    "kill_machine": 4,
    "kill_worker": 4,
    "freeze_machine": 2,
    "freeze_worker": 1,
    "slander": 1,
    "network": 10,
    "corrupt": 1,
    "diverge": 1,
    "timeout": 1,
}


class AdjacentSimulation(Simulation):
    """One run; see :class:`Simulation`."""

    patience = 1.0

    def __init__(self, seed: int, machines: int, workers: int = 1, *, trace: bool = False) -> None:
        super().__init__(seed, machines, workers, trace=trace, faults=_FAULTS)
        self.checkpoint_every = self.rng.choice((3, 4, 9))
        self.budget = self.rng.choice((1, 2, 2, 3, 3, 4))
        self.parts = (1, 1, 2, 8)[seed % 4]

    def tempt(self, chance: float, delays: Sequence[int]) -> None:
        """Rather while some replay jointly."""
        super().tempt(chance if any(worker.portion for worker in self.running) else chance / 8, delays)


def simulate_adjacent(seed: int, machines: int, workers: int = 1, *, trace: bool = False) -> Outcome:
    """Run one seed.

    Raises:
        Violation: with the command that runs this seed again.
    """
    sim = AdjacentSimulation(seed, machines, workers, trace=trace)
    return run_seed(sim, f"python {Path(__file__)} {seed} --shape {machines}x{workers}")


if __name__ == "__main__":
    main(simulate_adjacent)
