"""Data-parallel jobs in the simulated network: what replicas have in common, whatever fails (paper §4).

See `replicated_simulation.py` for what is checked, and for how to run one seed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from replicated_simulation import simulate_replicas
from simulation import Violation

from swift_ft.recovery import ladder, plan
from swift_ft.recovery.events import Reported
from swift_ft.recovery.job_state import Phase
from swift_ft.recovery.plan import Way

RUNGS = ("nothing", "forward", "copy", "undo", "newcomer", "half updated")


def run_all(machines: int, workers: int, seeds: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(seeds):
        seen += simulate_replicas(seed, machines, workers).seen
    return seen


def test_three_replicas() -> None:
    seen = run_all(3, 1, 3_000)
    assert not [way for way in set(Way) - {Way.RESTART, Way.REPLAY} if not seen[f"way: {way}"]]
    assert not [rung for rung in RUNGS if seen[f"rung: {rung}"] < 10]
    missing = [
        (fault, phase)
        for fault in ("kill_machine", "kill_worker", "freeze_machine", "slander")
        for phase in (Phase.FORMING, Phase.AGREEING, Phase.LIVE)
        if not seen[f"fault: {fault} while {phase}"]
    ]
    assert not missing
    assert not [bucket for bucket in range(3) if seen[f"transfer broken at {bucket}"] < 20]
    for who in ("the source", "a target", "another"):
        assert seen[f"transfer of whole broken by {who}"] > 20, who
        assert seen[f"transfer of parameters broken by {who}"], who
    for what in ("survivor kept its own state", "survivor took a whole state", "restarted"):
        assert seen[what] > 5, what
    assert seen["broken in an update"] > 500
    assert seen["early checkpoint committed"] > 250
    assert seen["finished"] > 5 * seen["gave up"]


@pytest.mark.parametrize(("machines", "workers", "seeds"), [(2, 1, 1_000), (4, 1, 1_000), (2, 2, 600)])
def test_other_shapes(machines: int, workers: int, seeds: int) -> None:
    seen = run_all(machines, workers, seeds)
    assert not [rung for rung in RUNGS if not seen[f"rung: {rung}"]]
    assert seen[f"way: {Way.FALLBACK}"]


def test_a_seed_is_the_same_run_every_time() -> None:
    for seed in range(40):
        assert simulate_replicas(seed, 3) == simulate_replicas(seed, 3)


def test_a_broken_ladder_is_found_and_its_seed_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that stand in the middle of an update are taken for equal."""

    def careless(group: Mapping[int, Reported]) -> ladder.Agreement | None:
        agreement = ladder.agree(group)
        return agreement and replace(agreement, undo={})

    monkeypatch.setattr(plan, "agree", careless)
    with pytest.raises(Violation, match=r"seed \d+: .*\nto see it: python .*replicated_simulation.py \d+"):
        run_all(3, 1, 300)
