"""Many seeds of a simulated job."""

from __future__ import annotations

from collections import Counter

from swift_ft.recovery.plan import RecoveryMode
from swift_ft.testing.simulation import JobKind, simulate

OF_OTHER_JOBS = frozenset({RecoveryMode.MEMORY, RecoveryMode.LAYOUT})
"""Ways that only jobs with copies, or with layers that move, can take."""

SHAPES = {
    JobKind.PIPELINE: (4, 1),
    JobKind.ADJACENT: (5, 1),
    JobKind.REPLICATED: (3, 1),
    JobKind.STAGED: (4, 1),
    JobKind.MEMORY: (4, 1),
    JobKind.LAYERED: (4, 1),
    JobKind.PIPELINES: (4, 1),
}
"""Machines, and workers of each: of all jobs but those without a session, whose workers tell nothing."""


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
