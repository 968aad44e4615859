"""Simulated jobs that return to copies in memory: never to a mixture of histories, whatever fails."""

from __future__ import annotations

from collections import Counter

import pytest

from swift_ft.recovery.plan import RecoveryMode
from swift_ft.testing.simulation import JobKind, Violation, simulate
from swift_ft.testing.simulation.jobs.memory import MemoryWorker
from tests.support.simulation import run_seeds


def run_jobs(machines: int, workers: int, seeds: int) -> Counter[str]:
    return run_seeds(JobKind.MEMORY, machines, workers, seeds)


def test_three_machines() -> None:
    seen = run_jobs(3, 1, 800)
    assert seen[f"mode: {RecoveryMode.MEMORY}"] > 100
    assert seen[f"mode: {RecoveryMode.FALLBACK}"] > 10
    for what in ("loaded from its own memory", "loaded from another's", "sent again", "copy skipped"):
        assert seen[what] > 20, what
    assert seen["copy complete"] > 1_000
    assert seen["finished"] > 4 * seen["gave up"]


@pytest.mark.thorough
@pytest.mark.parametrize(("machines", "workers", "seeds"), [(2, 1, 400), (2, 2, 200), (1, 2, 50)])
def test_other_shapes(machines: int, workers: int, seeds: int) -> None:
    seen = run_jobs(machines, workers, seeds)
    assert bool(seen[f"mode: {RecoveryMode.MEMORY}"]) == (machines > 1)


def test_machines_of_a_few_failure_domains() -> None:
    """A newcomer from another domain changes who holds whose copies."""
    seen = run_jobs(4, 1, 300)
    assert seen["another holder"] > 20
    assert seen[f"mode: {RecoveryMode.MEMORY}"] > 20


def test_a_seed_is_the_same_run_every_time() -> None:
    for seed in range(20):
        assert simulate(JobKind.MEMORY, seed, 3) == simulate(JobKind.MEMORY, seed, 3)


# ------------------------------------------------------------------------------- defects that are found


def test_copies_of_an_abandoned_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither their owners nor their holders drop them: a later loss finds them, and mixes two histories."""
    monkeypatch.setattr(MemoryWorker, "keep_only", lambda self, base: None)
    monkeypatch.setattr(MemoryWorker, "drop_after", lambda self, iteration: None)
    with pytest.raises(Violation, match="to see it: python -m swift_ft"):
        run_seeds(JobKind.MEMORY, 3, 1, 100, 2_150)
