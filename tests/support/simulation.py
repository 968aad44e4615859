"""Many seeds of a simulated job."""

from __future__ import annotations

from collections import Counter

from swift_ft.recovery.plan import RecoveryMode
from swift_ft.testing.simulation import JobKind, simulate

OF_OTHER_JOBS = frozenset({RecoveryMode.MEMORY, RecoveryMode.LAYOUT})
"""Ways that only jobs with copies, or with layers that move, can take."""


def run_seeds(
    kind: JobKind, machines: int, workers: int, seeds: int, first_seed: int = 0, *, heads: bool = False
) -> Counter[str]:
    """Counts what happened in all runs.

    Raises:
        Violation: for the first seed in which something happens that must never happen.
    """
    seen: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + seeds):
        seen += simulate(kind, seed, machines, workers, heads=heads).seen
    return seen
