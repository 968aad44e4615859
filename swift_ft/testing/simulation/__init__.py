"""The recovery protocol in simulated jobs, through thousands of seeded orders of failures.

A simulated job has machines, workers and a journal, but no sockets, threads or clock. Each of its
participants follows the real protocol (`swift_ft.recovery`), and faults are drawn from the seed. What must
never happen raises :class:`Violation`.

    python -m swift_ft.testing.simulation --job pipeline --shape 4x1 --seeds 10000

runs many seeds, and ``--seed N`` shows the journal of one.
"""

from swift_ft.testing.simulation.job import Outcome, SimulatedJob
from swift_ft.testing.simulation.seeds import JobKind, make_job, simulate
from swift_ft.testing.simulation.store import Violation

__all__ = ["JobKind", "Outcome", "SimulatedJob", "Violation", "make_job", "simulate"]
