"""Simulated pipelines that are each other's replicas: a stage that is ahead may have to roll back.

See `swift_ft/testing/simulation/jobs/staged.py` for what is checked.
"""

from __future__ import annotations

from collections import Counter

import pytest
from immutables import Map

from swift_ft.recovery import targets
from swift_ft.recovery.handlers import recovery
from swift_ft.recovery.plan import RecoveryMode
from swift_ft.testing.simulation import JobKind, Violation, simulate
from swift_ft.testing.simulation.jobs.staged import LOST_STAGES
from tests.support.simulation import OF_OTHER_JOBS, run_seeds


def run_jobs(machines: int, workers: int, seeds: int, first_seed: int = 0) -> Counter[str]:
    return run_seeds(JobKind.STAGED, machines, workers, seeds, first_seed)


def test_two_pipelines_of_two_stages() -> None:
    seen = run_jobs(4, 1, 1_200)
    assert not [
        mode
        for mode in set(RecoveryMode) - {RecoveryMode.REPLAY, RecoveryMode.RESTART, *OF_OTHER_JOBS}
        if not seen[f"mode: {mode}"]
    ]
    for what in ("undid an update", "rolled back by copy", "resent from log"):
        assert seen[what] > 20, what
    assert seen["took back no update"] > 4
    assert seen["late PartPersisted while agreeing"] > 100
    assert seen["late PartPersisted while live"] > 500
    assert seen["finished"] > 5 * seen["gave up"]


@pytest.mark.thorough
@pytest.mark.parametrize(("machines", "workers", "seeds"), [(2, 2, 500), (6, 1, 300)])
def test_other_shapes(machines: int, workers: int, seeds: int) -> None:
    seen = run_jobs(machines, workers, seeds)
    assert seen["undid an update"]
    assert seen[f"mode: {RecoveryMode.FALLBACK}"]


def test_stages_that_are_lost_in_all_pipelines() -> None:
    seen = run_jobs(4, 1, 800, LOST_STAGES + 1_200) + run_jobs(6, 1, 400, LOST_STAGES + 400)
    for what in (
        "replay group of 2",
        "replay group of 3",
        "joint replay continued",
        f"mode: {RecoveryMode.FALLBACK}",
    ):
        assert seen[what], what
    assert seen["replayed jointly"] > 40
    assert seen["finished"] > 5 * seen["gave up"]


def test_a_seed_is_the_same_run_every_time() -> None:
    for seed in range(40):
        assert simulate(JobKind.STAGED, seed, 4) == simulate(JobKind.STAGED, seed, 4)


def test_a_part_that_is_durable_after_its_iteration_was_undone_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forgotten(*_: object) -> list[tuple[int, int]]:
        return []

    monkeypatch.setattr(recovery, "_revoked", forgotten)
    with pytest.raises(Violation, match=r"several histories|names parts that do not|is not in the store"):
        run_jobs(4, 1, 1_500)


def test_a_part_that_was_there_before_its_iteration_was_undone_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_kept(parts: Map[int, Map[int, str]], vouches: object) -> Map[int, Map[int, str]]:
        return parts

    monkeypatch.setattr(recovery, "_vouched_for", all_kept)
    # A marker that would name a part that is not there is not written, and then the checkpoint is missing.
    wrong = r"parts of several histories|names parts that do not exist|its last checkpoint, of .*, is not in"
    with pytest.raises(Violation, match=wrong):
        run_jobs(4, 1, 1_500)


def test_a_replay_next_to_a_stage_whose_log_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica gives it its state, and not what it had sent."""
    monkeypatch.setattr(targets, "_add_unlogged_neighbours", lambda reconciled, *_: dict(reconciled))
    with pytest.raises(Violation, match=r"needs iteration .* of rank .*'s log: missing"):
        run_jobs(4, 1, 300, LOST_STAGES)


def test_a_log_that_is_missing_since_an_earlier_recovery_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_log_gaps", lambda *_: Map())
    with pytest.raises(Violation, match=r"needs iteration .* of rank .*'s log: missing"):
        run_jobs(4, 1, 500, LOST_STAGES + 3_500)
