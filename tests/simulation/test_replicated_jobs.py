"""Simulated data-parallel jobs: replicas stay equal, whatever fails (paper §4).

See `swift_ft/testing/simulation/jobs/replicated.py` for what is checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from swift_ft.recovery import reconcile, targets
from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.job_state import Phase
from swift_ft.recovery.plan import RecoveryMode
from swift_ft.testing.simulation import JobKind, Violation, simulate
from tests.support.simulation import OF_OTHER_JOBS, run_seeds

WAYS_TO_EQUALITY = ("nothing", "forward", "copy", "undo", "newcomer", "half updated")


def run_jobs(machines: int, workers: int, seeds: int, first_seed: int = 0) -> Counter[str]:
    return run_seeds(JobKind.REPLICATED, machines, workers, seeds, first_seed)


def test_three_replicas() -> None:
    seen = run_jobs(3, 1, 3_000, 5_000)
    assert not [
        mode
        for mode in set(RecoveryMode) - {RecoveryMode.RESTART, RecoveryMode.REPLAY, *OF_OTHER_JOBS}
        if not seen[f"mode: {mode}"]
    ]
    assert not [way for way in WAYS_TO_EQUALITY if seen[f"equal by: {way}"] < 10]
    missing = [
        (fault, phase)
        for fault in ("kill_machine", "kill_worker", "freeze_machine", "false_alarm")
        for phase in (Phase.FORMING, Phase.AGREEING, Phase.LIVE)
        if not seen[f"fault: {fault} while {phase}"]
    ]
    assert not missing
    assert not [bucket for bucket in range(3) if seen[f"transfer broken at {bucket}"] < 20]
    for cause in ("the source", "a target", "another"):
        assert seen[f"transfer of whole broken by {cause}"] > 20, cause
        assert seen[f"transfer of parameters broken by {cause}"], cause
    for what in ("survivor kept its own state", "survivor received a whole state", "restarted"):
        assert seen[what] > 5, what
    assert seen["interrupted in an update"] > 500
    assert seen["early checkpoint committed"] > 250
    assert seen["finished"] > 5 * seen["gave up"]


@pytest.mark.thorough
@pytest.mark.parametrize(("machines", "workers", "seeds"), [(2, 1, 3_000), (4, 1, 1_000), (2, 2, 600)])
def test_other_shapes(machines: int, workers: int, seeds: int) -> None:
    seen = run_jobs(machines, workers, seeds)
    assert not [way for way in WAYS_TO_EQUALITY if not seen[f"equal by: {way}"]]
    assert seen[f"mode: {RecoveryMode.FALLBACK}"]


def test_a_seed_is_the_same_run_every_time() -> None:
    for seed in range(40):
        assert simulate(JobKind.REPLICATED, seed, 3) == simulate(JobKind.REPLICATED, seed, 3)


def test_a_broken_reconciliation_is_found_and_its_seed_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that were interrupted in an update count as equal."""

    def careless(group: Mapping[int, StatusReported]) -> reconcile.Reconciliation | None:
        agreement = reconcile.reconcile_replicas(group)
        return agreement and replace(agreement, undo={})

    monkeypatch.setattr(targets, "reconcile_replicas", careless)
    with pytest.raises(
        Violation,
        match=r"seed \d+: .*\nto see it: python -m swift_ft\S+ --job replicated --shape 3x1 --seed \d+",
    ):
        run_jobs(3, 1, 300)
