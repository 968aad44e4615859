"""When batches are dealt anew, and how."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from immutables import Map

from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.data import GlobalBatches
from swift_ft.errors import UsageError
from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.job_state import JobShape, Layouts, PendingLayout, Phase, RecoveryRound, Shares, State
from swift_ft.recovery.membership import Membership
from swift_ft.recovery.plan import Plan, RecoveryMode
from swift_ft.runtime.data.check import BatchCheck
from swift_ft.runtime.data.dealing import DealtBatches
from swift_ft.runtime.elastic.layer_profiler import LayerCosts
from swift_ft.runtime.elastic.reshare import Reshare, ShareMicrobatches

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


# ------------------------------------------------------------------------------- microbatches of pipelines


class Costs:
    """Twelve layers that take equally long, once they are measured."""

    def __init__(self, known: bool) -> None:
        self._known = known

    def read(self, _: State) -> list[LayerProfile] | None:
        return [LayerProfile(1000, 2000, 0)] * 12 if self._known else None


def pipelines(
    *, hosts: dict[str, str] | None = None, pace: dict[str, int] | None = None, **layouts: Any
) -> State:
    """Two pipelines of three machines."""
    reports = {
        rank: StatusReported(
            rank=rank, generation=1, iteration=10, stages=(rank % 3,), pipeline=rank - rank % 3, layers=12
        )
        for rank in range(6)
    }
    return State(
        phase=Phase.LIVE,
        shape=JobShape(machines=6),
        membership=Membership(
            members=Map({slot: f"{name}.0" for slot, name in enumerate("ABCDEF")}),
            hosts=Map(hosts or {}),
            pace=Map(pace or {}),
        ),
        round=RecoveryRound(statuses=Map(reports), plan=Plan(RecoveryMode.REPLICA, 10)),
        layouts=Layouts(**{"present": (4,) * 6, "pipelines": ((0, 1, 2), (3, 4, 5)), **layouts}),
    )


def wanted_of_pipelines(
    state: State,
    *,
    by_pace: bool = False,
    known: bool = True,
    fewest: int = 1,
    planned: tuple[int, ...] = (),
) -> tuple[int, ...] | None:
    batches = GlobalBatches(cast(Any, range(100)), 32)
    pipeline: Any = SimpleNamespace(
        microbatches=16,
        counts=planned or (8, 8),
        planned=planned,
        fewest_microbatches=fewest,
        follow=lambda _: None,
        has_first_stage=True,
    )
    dealt = DealtBatches([batches], cast(BatchCheck, SimpleNamespace(follow=lambda _: None)), pipeline)
    dealt.deal(2, 0, sharded=False)
    dealt.follow(state.layouts.shares)
    costs: Any = Costs(known)
    return ShareMicrobatches(dealt, cast(LayerCosts, costs), pipeline, by_pace=by_pace).wanted(state, 20)


HOSTED = {"E.0": "D.0"}


def test_a_pipeline_with_a_machine_less_gets_fewer_microbatches() -> None:
    assert wanted_of_pipelines(pipelines(hosts=HOSTED)) == (22, 10)
    assert wanted_of_pipelines(pipelines(hosts={"B.0": "A.0"})) == (12, 20)  # as good as (10, 22)
    assert wanted_of_pipelines(pipelines()) is None


@pytest.mark.parametrize("cut", [(3, 3, 6), (2, 4, 6), (5, 1, 6)])
def test_once_layers_have_moved_it_gets_more(cut: tuple[int, ...]) -> None:
    """However many of its machine's layers are in which of its stages."""
    moved: dict[str, Any] = {"present": (4, 4, 4, *cut), "shares": (Shares(12, (22, 10)),)}
    assert wanted_of_pipelines(pipelines(hosts=HOSTED, **moved)) == (20, 12)


def test_a_machine_that_computes_for_both_pipelines() -> None:
    """It slows both alike."""
    assert wanted_of_pipelines(pipelines(hosts={"E.0": "B.0"})) is None


def test_not_before_layers_were_measured() -> None:
    assert wanted_of_pipelines(pipelines(hosts=HOSTED), known=False) is None


def test_a_slow_machine_slows_its_pipeline() -> None:
    slow = pipelines(pace={"F.0/0": 3000})
    assert wanted_of_pipelines(slow) is None  # --stragglers warn
    assert wanted_of_pipelines(slow, by_pace=True) == (24, 8)
    assert wanted_of_pipelines(slow, by_pace=True, fewest=6) == (20, 12)


def test_shares_of_pipelines_go_back() -> None:
    assert wanted_of_pipelines(pipelines(shares=(Shares(12, (22, 10)),))) == (16, 16)


def test_planned_shares_stay_until_a_machine_is_lost() -> None:
    """They are those of a plan, which knows the devices."""
    assert wanted_of_pipelines(pipelines(), planned=(5, 11)) is None
    assert wanted_of_pipelines(pipelines(hosts=HOSTED), planned=(5, 11)) == (22, 10)
    back = pipelines(shares=(Shares(12, (22, 10)),))
    assert wanted_of_pipelines(back, planned=(5, 11)) == (10, 22)


def test_a_batch_that_is_no_whole_number_of_planned_microbatches() -> None:
    with pytest.raises(UsageError, match="no whole number of the 15 microbatches that the plan gives"):
        wanted_of_pipelines(pipelines(), planned=(5, 10))


def test_who_deals_the_batches() -> None:
    """Those that the script deals to replicas of its own may not follow other numbers of microbatches."""
    left, own = (
        GlobalBatches(cast(Any, range(100)), BATCH),
        GlobalBatches(cast(Any, range(100)), BATCH, replicas=3),
    )
    for batches, by_session in (([left], True), ([own], False), ([left, own], False), ([], False)):
        left.dealt = False
        dealt = DealtBatches(batches, cast(BatchCheck, None))
        dealt.deal(3, 0, sharded=False)
        assert dealt.by_session == by_session
