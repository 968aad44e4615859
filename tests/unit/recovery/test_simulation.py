"""The recovery protocol in a simulated network, through thousands of seeded failure orders.

See `simulation.py` for what is simulated, and for how to run one seed again.
"""

from __future__ import annotations

from collections import Counter

import pytest
import simulated_process
from simulation import Violation, simulate

from swift_ft.recovery import protocol
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.plan import Way

FAULTS_EVERYWHERE = ("kill_machine", "kill_worker", "freeze_machine", "slander")


def run_all(machines: int, workers: int, seeds: int, *, bare: bool = False) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(seeds):
        seen += simulate(seed, machines, workers, bare=bare).seen
    return seen


def test_a_pipeline_of_four() -> None:
    seen = run_all(4, 1, 4_000)
    assert not [way for way in set(Way) - {Way.RESTART, Way.REPLICA} if not seen[f"way: {way}"]]
    missing = [
        (fault, phase)
        for fault in FAULTS_EVERYWHERE
        for phase in set(Phase) - {Phase.ENDED}
        if not seen[f"fault: {fault} while {phase}"]
    ]
    assert not missing
    for what in ("served", "thawed", "timed out while agreeing", "timed out while recovering"):
        assert seen[what] > 20, what
    for late in ("Reported", "Ready", "CannotReplay", "Interrupted", "Durable", "Lost", "TimedOut", "Failed"):
        assert seen[f"no news: {late}"], late
    for late in (
        "Reported while agreeing",
        "Ready while recovering",
        "Finished while live",
        "Interrupted while live",
        "CannotReplay while recovering",
    ):
        assert seen[f"late {late}"], late
    assert seen["waited for a log"] > 100  # whose writer was gone, before anybody had been told
    assert seen["early checkpoint committed"] > 400
    assert seen["missed an early checkpoint"] > 50
    assert seen["finished"] > 10 * seen["gave up"] / 2


@pytest.mark.parametrize(("machines", "workers", "seeds"), [(2, 1, 800), (3, 1, 900), (5, 1, 500)])
def test_shorter_and_longer_pipelines(machines: int, workers: int, seeds: int) -> None:
    seen = run_all(machines, workers, seeds)
    assert seen[f"way: {Way.REPLAY}"]
    assert seen["served"]


def test_machines_with_two_workers() -> None:
    """Who is rebuilt on a machine is never alone."""
    seen = run_all(2, 2, 600)
    for way in (Way.FALLBACK, Way.CONTINUE, Way.REPLAY):
        assert seen[f"way: {way}"]
    assert seen["replayed jointly"]
    assert not seen["portion of 0"]


def test_scripts_without_a_session() -> None:
    seen = run_all(3, 1, 800, bare=True)
    assert seen["finished"]
    assert seen["gave up"]


def test_a_seed_is_the_same_run_every_time() -> None:
    for seed in range(40):
        assert simulate(seed, 4) == simulate(seed, 4)


def test_a_broken_protocol_is_found_and_its_seed_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(state: State, reason: str) -> State:
        return state

    monkeypatch.setattr(protocol, "_restart", forgetful)
    with pytest.raises(Violation, match=r"seed \d+: .*\nto see it: python .*simulation.py \d+ --shape 4x1"):
        run_all(4, 1, 300)


def test_a_checkpoint_without_the_part_of_one_who_was_not_asked_in_time_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hasty(state: State, rank: int) -> int | None:
        parts = state.durable.get(state.wanted, {}) if state.wanted is not None else {}
        return state.wanted if rank == 0 and len(parts) >= state.world - 1 else None

    monkeypatch.setattr(simulated_process, "commit_due", hasty)
    with pytest.raises(Violation, match="names parts that are not there"):
        run_all(4, 1, 300)
