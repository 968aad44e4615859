"""Pipelines that are each other's replicas in the simulated network: who is ahead may have to go back.

See `staged_simulation.py` for what is checked, and for how to run one seed again.
"""

from __future__ import annotations

from collections import Counter

import pytest
from simulation import Violation
from staged_simulation import LOST_STAGES, simulate_stages

from swift_ft.recovery import plan, protocol
from swift_ft.recovery.job_state import State
from swift_ft.recovery.plan import Plan, Way


def run_all(machines: int, workers: int, seeds: int, first: int = 0) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first, first + seeds):
        seen += simulate_stages(seed, machines, workers).seen
    return seen


def test_two_pipelines_of_two_stages() -> None:
    seen = run_all(4, 1, 1_200)
    assert not [way for way in set(Way) - {Way.REPLAY, Way.RESTART} if not seen[f"way: {way}"]]
    for what in ("took an update back", "went back by copy", "served"):
        assert seen[what] > 20, what
    assert seen["late Durable while agreeing"] > 100
    assert seen["late Durable while live"] > 500
    assert seen["finished"] > 5 * seen["gave up"]


@pytest.mark.parametrize(("machines", "workers", "seeds"), [(2, 2, 500), (6, 1, 300)])
def test_other_shapes(machines: int, workers: int, seeds: int) -> None:
    seen = run_all(machines, workers, seeds)
    assert seen["took an update back"]
    assert seen[f"way: {Way.FALLBACK}"]


def test_stages_that_are_lost_in_all_pipelines() -> None:
    seen = run_all(4, 1, 500, LOST_STAGES) + run_all(6, 1, 150, LOST_STAGES)
    for what in ("portion of 2", "portion of 3", "went on jointly", f"way: {Way.FALLBACK}"):
        assert seen[what], what
    assert seen["replayed jointly"] > 40
    assert seen["finished"] > 5 * seen["gave up"]


def test_a_seed_is_the_same_run_every_time() -> None:
    for seed in range(40):
        assert simulate_stages(seed, 4) == simulate_stages(seed, 4)


def test_a_part_that_comes_after_its_iteration_was_taken_back_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forgotten(state: State, plan: Plan) -> list[tuple[int, int]]:
        return []

    monkeypatch.setattr(protocol, "_taken_back", forgotten)
    with pytest.raises(Violation, match=r"parts of several histories|names parts that are not there"):
        run_all(4, 1, 1_500)


def test_a_part_that_was_there_before_its_iteration_was_taken_back_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_kept(durable: dict[int, dict[int, str]], plan: Plan) -> dict[int, dict[int, str]]:
        return durable

    monkeypatch.setattr(protocol, "_parts_kept", all_kept)
    with pytest.raises(Violation, match=r"parts of several histories|names parts that are not there"):
        run_all(4, 1, 1_500)


def test_a_replay_beside_one_whose_log_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes back from a replica, and what it sent before does not."""
    monkeypatch.setattr(plan, "_with_who_logged_too_little", lambda _, settled, *__: settled)
    with pytest.raises(Violation, match=r"needs iteration .* of rank .*'s log: missing"):
        run_all(4, 1, 300, LOST_STAGES)


def test_a_log_that_is_missing_since_an_earlier_recovery_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_restored", lambda *_: {})
    with pytest.raises(Violation, match=r"needs iteration .* of rank .*'s log: missing"):
        run_all(4, 1, 600, LOST_STAGES)
