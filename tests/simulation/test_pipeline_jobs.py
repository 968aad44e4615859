"""The recovery protocol in simulated pipelines, through thousands of seeded orders of failures.

See `swift_ft/testing/simulation/__init__.py` for what is simulated, and for how to show one seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from swift_ft.recovery.handlers import membership, recovery
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import RecoveryMode
from swift_ft.testing.simulation import JobKind, Violation, process, simulate
from tests.support.simulation import OF_OTHER_JOBS, run_seeds

FAULTS_EVERYWHERE = ("kill_machine", "kill_worker", "freeze_machine", "false_alarm")


def run_pipelines(machines: int, workers: int, seeds: int) -> Counter[str]:
    return run_seeds(JobKind.PIPELINE, machines, workers, seeds)


def test_a_pipeline_of_four() -> None:
    seen = run_pipelines(4, 1, 4_000)
    assert not [
        mode
        for mode in set(RecoveryMode) - {RecoveryMode.RESTART, RecoveryMode.REPLICA, *OF_OTHER_JOBS}
        if not seen[f"mode: {mode}"]
    ]
    missing = [
        (fault, phase)
        for fault in FAULTS_EVERYWHERE
        for phase in set(Phase) - {Phase.ENDED}
        if not seen[f"fault: {fault} while {phase}"]
    ]
    assert not missing
    for what in ("resent from log", "thawed", "timed out while agreeing", "timed out while recovering"):
        assert seen[what] > 10, what
    for late in (
        "StatusReported",
        "WorkerReady",
        "ReplayFailed",
        "CommunicationFailed",
        "PartPersisted",
        "MachineLost",
        "DeadlinePassed",
        "ScriptFailed",
    ):
        assert seen[f"no news: {late}"], late
    for late in (
        "StatusReported while agreeing",
        "WorkerReady while recovering",
        "WorkerFinished while live",
        "CommunicationFailed while live",
        "ReplayFailed while recovering",
    ):
        assert seen[f"late {late}"], late
    assert seen["waited for a log"] > 30  # whose writer was gone before the journal said so
    assert seen["early checkpoint committed"] > 400
    assert seen["missed an early checkpoint"] > 50
    assert seen["finished"] > 5 * seen["gave up"]


@pytest.mark.thorough
@pytest.mark.parametrize(("machines", "workers", "seeds"), [(2, 1, 800), (3, 1, 900), (5, 1, 500)])
def test_shorter_and_longer_pipelines(machines: int, workers: int, seeds: int) -> None:
    seen = run_pipelines(machines, workers, seeds)
    assert seen[f"mode: {RecoveryMode.REPLAY}"]
    assert seen["resent from log"] or machines == 2  # of two, one is ahead once in 1,000 runs


def test_machines_with_two_workers() -> None:
    """A worker that is rebuilt always replays with the other worker of its machine."""
    seen = run_pipelines(2, 2, 600)
    for mode in (RecoveryMode.FALLBACK, RecoveryMode.CONTINUE, RecoveryMode.REPLAY):
        assert seen[f"mode: {mode}"]
    assert seen["replayed jointly"]
    assert not seen["replay group of 0"]


def test_scripts_without_a_session() -> None:
    seen = run_seeds(JobKind.BARE, 3, 1, 800)
    assert seen["finished"]
    assert seen["gave up"]


def test_a_seed_is_the_same_run_every_time() -> None:
    for seed in range(40):
        assert simulate(JobKind.PIPELINE, seed, 4) == simulate(JobKind.PIPELINE, seed, 4)


def test_a_broken_protocol_is_found_and_its_seed_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(state: State, reason: str) -> State:
        return state

    for handlers in (membership, recovery):
        monkeypatch.setattr(handlers, "restart_all", forgetful)
    with pytest.raises(
        Violation,
        match=r"seed \d+: .*\nto see it: python -m swift_ft\S+ --job pipeline --shape 4x1 --seed \d+",
    ):
        run_pipelines(4, 1, 300)


def test_a_checkpoint_without_the_part_of_a_worker_that_learned_of_it_too_late_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hasty(state: State, rank: int) -> int | None:
        requested = state.checkpoints.requested
        parts: Mapping[int, Any] = {} if requested is None else state.checkpoints.parts.get(requested, {})
        return requested if rank == 0 and len(parts) >= state.world_size - 1 else None

    monkeypatch.setattr(process, "commit_due", hasty)
    with pytest.raises(Violation, match="names parts that do not exist"):
        run_pipelines(4, 1, 300)
