"""Jobs whose events travel through heads, which merge them, stall, die, and write what others have written.

The protocol must not notice: the same runs, orders of failures and checks as in the other tests, with events
that are late, come in blocks, and come twice, and with newcomers that begin from a snapshot.
"""

from __future__ import annotations

from collections import Counter

import pytest

from swift_ft.recovery.job_state import Phase
from swift_ft.testing.simulation import JobKind, simulate
from tests.support.simulation import SHAPES, run_seeds

WHAT_HEADS_DO = (
    "a head stalled",
    "a head woke up",
    "a head died before it had written",
    "a head died after it had written",
    "block of several events",
    "the same event twice",
)


def assert_met(seen: Counter[str]) -> None:
    assert not [what for what in WHAT_HEADS_DO if not seen[what]]
    assert seen["finished"] > seen["gave up"]


@pytest.mark.parametrize("kind", SHAPES)
def test_no_job_notices_its_heads(kind: JobKind) -> None:
    seen = run_seeds(kind, *SHAPES[kind], 300, heads=True)
    assert_met(seen)


@pytest.mark.parametrize("workers", [1, 2])
def test_newcomers_come_in_each_phase(workers: int) -> None:
    seen = run_seeds(JobKind.PIPELINE, 4, workers, 400, 10_000, heads=True)
    assert_met(seen)
    missing = [phase for phase in set(Phase) - {Phase.ENDED} if not seen[f"a newcomer while {phase}"]]
    assert not missing


@pytest.mark.thorough
@pytest.mark.parametrize("kind", SHAPES)
def test_many_seeds(kind: JobKind) -> None:
    assert_met(run_seeds(kind, *SHAPES[kind], 3_000, 20_000, heads=True))


def test_a_job_without_heads_writes_each_event_once_and_by_itself() -> None:
    for seed in range(20):
        seen = simulate(JobKind.PIPELINE, seed, 4).seen
        assert not [what for what in WHAT_HEADS_DO if seen[what]]
