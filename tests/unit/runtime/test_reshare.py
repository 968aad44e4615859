"""When batches are dealt anew, and how."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from immutables import Map

from swift_ft.data import GlobalBatches
from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.job_state import (
    JobShape,
    Layouts,
    Membership,
    PendingLayout,
    Phase,
    RecoveryRound,
    Shares,
    State,
)
from swift_ft.recovery.plan import Plan, RecoveryMode
from swift_ft.runtime.data.check import BatchCheck
from swift_ft.runtime.data.dealing import DealtBatches
from swift_ft.runtime.reshare import Reshare

BATCH = 24


def job(*, hosts: dict[str, str] | None = None, pace: dict[str, int] | None = None, **layouts: Any) -> State:
    """Three machines with a replica each."""
    reports = {
        rank: StatusReported(rank=rank, generation=1, iteration=10, holds=("m",), steps=60)
        for rank in range(3)
    }
    return State(
        phase=Phase.LIVE,
        shape=JobShape(machines=3),
        membership=Membership(
            members=Map({0: "A.0", 1: "B.0", 2: "C.0"}), hosts=Map(hosts or {}), pace=Map(pace or {})
        ),
        round=RecoveryRound(statuses=Map(reports), plan=Plan(RecoveryMode.REPLICA, 10)),
        layouts=Layouts(**layouts),
    )


def wanted(
    state: State, iteration: int = 20, *, weighted: bool = True, **options: Any
) -> tuple[int, ...] | None:
    batches = GlobalBatches(cast(Any, range(100)), BATCH, **options)
    dealt = DealtBatches([batches, "another part"], cast(BatchCheck, None))
    dealt.deal(3, 0, sharded=False)
    batches.follow(state.layouts.shares)
    assert not weighted or batches.weight
    return Reshare(dealt).wanted(state, iteration)


SLOW = {"B.0/0": 3000}


def test_a_slow_replica_gets_fewer_samples() -> None:
    assert wanted(job(pace=SLOW)) == (10, 4, 10)
    assert wanted(job(pace=SLOW), unit=4) == (12, 4, 8)
    assert wanted(job()) is None


def test_one_that_shares_a_device_gets_fewer() -> None:
    assert wanted(job(hosts={"B.0": "A.0"})) == (6, 6, 12)


def test_what_was_unlike_from_the_beginning_is_not_slow() -> None:
    assert wanted(job(), weights=[1.0, 1.0, 2.0]) is None
    assert wanted(job(pace={"C.0/0": 2000}), weights=[1.0, 1.0, 2.0]) == (8, 8, 8)


def test_shares_go_back() -> None:
    changed = (Shares(12, (11, 3, 10)),)
    assert wanted(job(shares=changed)) == (8, 8, 8)
    assert wanted(job(shares=changed, pace=SLOW)) is None


@pytest.mark.parametrize(
    ("state", "iteration"),
    [
        (job(pace=SLOW, pending=PendingLayout(22, shares=(11, 3, 10))), 20),
        (job(pace=SLOW), 10),  # the first iteration after a loss
        (job(pace=SLOW), 57),  # it does not pay any more
        (job(shares=(Shares(2, (11, 3, 10)), Shares(4, (8, 8, 8)), Shares(16, (11, 3, 10)))), 20),
        (job(pace={"B.0/0": 1030}), 20),  # it is not worth it
    ],
)
def test_nothing_changes(state: State, iteration: int) -> None:
    assert wanted(state, iteration) is None


def test_not_without_the_weight() -> None:
    """Gradients would be those of another average."""
    assert wanted(job(pace=SLOW), weighted=False) is None


def test_not_if_a_device_trains_no_replica() -> None:
    four = replace(job(pace=SLOW), shape=JobShape(machines=3, workers_per_machine=2))
    assert wanted(four) is None


def test_not_where_units_are_too_large() -> None:
    assert wanted(job(pace=SLOW), unit=8) is None
