"""Simulated pipelines that are replicas of each other by layer: no copy of a layer is ever another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from swift_ft.recovery import plan
from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.handlers import recovery
from swift_ft.recovery.layer_replicas import LayerReconciliation, reconcile_layers
from swift_ft.recovery.plan import RecoveryMode
from swift_ft.testing.simulation import JobKind, Violation, simulate
from tests.support.simulation import run_seeds


def run_jobs(machines: int, workers: int, seeds: int) -> Counter[str]:
    return run_seeds(JobKind.PIPELINES, machines, workers, seeds)


def test_two_pipelines_of_two_machines() -> None:
    seen = run_jobs(4, 1, 1_000)
    assert seen[f"mode: {RecoveryMode.REPLICA}"] > 300
    assert seen[f"mode: {RecoveryMode.FALLBACK}"] > 50
    assert seen["completes alone"] > 10
    assert seen["did not learn that all have their averages"] > 100
    assert seen["forward"] > 10 * seen["back"] > 0
    assert seen["transfer broken"] > 50
    assert seen["finished"] > 3 * seen["gave up"]


@pytest.mark.thorough
@pytest.mark.parametrize(("machines", "workers", "seeds"), [(4, 1, 10_000), (6, 1, 3_000), (2, 2, 2_000)])
def test_many(machines: int, workers: int, seeds: int) -> None:
    assert run_jobs(machines, workers, seeds)[f"mode: {RecoveryMode.FALLBACK}"] > 0


def test_a_seed_is_the_same_run_every_time() -> None:
    for seed in range(20):
        assert simulate(JobKind.PIPELINES, seed, 4) == simulate(JobKind.PIPELINES, seed, 4)


# ------------------------------------------------------------------------------- defects that are found


def find(defect: str) -> None:
    with pytest.raises(Violation, match=defect):
        run_jobs(4, 1, 1_000)


def test_who_has_no_averages_completes_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_can(statuses: Mapping[int, StatusReported], placed: Any) -> LayerReconciliation | None:
        every = {rank: replace(s, completes=s.live) for rank, s in statuses.items()}
        return reconcile_layers(every, placed)

    monkeypatch.setattr(plan, "reconcile_layers", all_can)
    find("is to complete iteration")


def test_a_transfer_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_only(statuses: Mapping[int, StatusReported], placed: Any) -> LayerReconciliation | None:
        found = reconcile_layers(statuses, placed)
        return found and replace(found, transfers=found.transfers[:1])

    monkeypatch.setattr(plan, "reconcile_layers", first_only)
    find("has no state, and receives none|goes live")


def test_parts_of_who_completes_alone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_whole_at", lambda chosen, rank: chosen.tasks[rank].begin)
    find("is remembered although|is not in the store")
