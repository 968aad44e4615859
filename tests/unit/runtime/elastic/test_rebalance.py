"""When layers are shared anew, and how."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map

from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.costs.shared_machines import balanced, slowest_ns
from swift_ft.recovery.devices import devices_of_stages
from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.job_state import JobShape, Layouts, PendingLayout, Phase, RecoveryRound, State
from swift_ft.recovery.membership import Membership
from swift_ft.recovery.plan import Plan, RecoveryMode
from swift_ft.runtime.elastic.layer_profiler import LayerCosts
from swift_ft.runtime.elastic.rebalance import Rebalance


def layers(*times: int) -> list[LayerProfile]:
    return [LayerProfile(time, 2 * time, 0) for time in times]


@given(
    st.lists(st.integers(1, 9), min_size=4, max_size=9),
    st.lists(st.sampled_from("abc"), min_size=2, max_size=4),
)
def test_as_good_as_equal_shares(times: list[int], machines: list[str]) -> None:
    """At least as good as all other cuts, where a machine gives each stage an equal share of its time."""
    profile, stages = layers(*times), len(machines)

    def slowest_share(layout: tuple[int, ...]) -> int:
        ends = [0, *itertools.accumulate(layout)]
        costs = [
            sum(one.compute_ns for one in profile[a:b]) * machines.count(machine)
            for (a, b), machine in zip(itertools.pairwise(ends), machines, strict=True)
        ]
        return max(costs)

    cuts = itertools.combinations(range(1, len(times)), stages - 1)
    every = [tuple(b - a for a, b in itertools.pairwise((0, *cut, len(times)))) for cut in cuts]
    best = balanced(profile, machines)
    assert slowest_ns(profile, machines, best) <= min(map(slowest_share, every))


def test_a_machine_with_two_stages_need_not_give_them_equal_shares() -> None:
    assert slowest_ns(layers(*[1] * 10), "aab", balanced(layers(*[1] * 10), "aab")) == 15


def published(rank: int) -> bytes:
    """What a worker has measured."""
    own = [
        {"forward_ns": 1, "backward_ns": 2, "state_bytes": 0, "name": str(number)}
        for number in range(3 * rank, 3 * rank + 3)
    ]
    return json.dumps({rank: own}).encode()


def job(*, guest: bool = True, at: int = 10, **layouts: Any) -> State:
    """Three machines of one stage each with three layers; the second is a guest of the first."""
    members = {0: "A.0", 1: "G.0" if guest else "B.0", 2: "C.0"}
    reports = {
        rank: StatusReported(rank=rank, generation=1, iteration=at, stages=(rank,), layers=9, steps=60)
        for rank in range(3)
    }
    placed = Map({rank: tuple(range(3 * rank, 3 * rank + 3)) for rank in range(3)})
    return State(
        phase=Phase.LIVE,
        shape=JobShape(machines=3),
        membership=Membership(members=Map(members), hosts=Map({"G.0": "A.0"} if guest else {})),
        round=RecoveryRound(statuses=Map(reports), plan=Plan(RecoveryMode.REPLAY, at)),
        layouts=Layouts(**{"placed": placed, **layouts}),
    )


def wanted(
    state: State, iteration: int = 11, *, known: bool = True, by_pace: bool = False
) -> tuple[int, ...] | None:
    costs = LayerCosts(9)
    if known:
        costs.take([published(rank) for rank in range(3)])
    return Rebalance(costs, by_pace=by_pace).wanted(state, iteration)


def test_a_host_gets_fewer_layers_for_each_of_its_workers() -> None:
    assert devices_of_stages(job()) == ("A.0/0", "A.0/0", "C.0/0")
    assert wanted(job()) == (2, 2, 5)


def test_workers_of_one_machine_have_a_device_each() -> None:
    """So nothing moves as long as there is no guest, whatever the layers cost."""
    state = job(guest=False)
    two = replace(state, shape=JobShape(machines=2, workers_per_machine=2))
    members = Map({0: "A.0", 1: "B.0"})
    two = replace(two, membership=replace(two.membership, members=members))
    assert devices_of_stages(two) == ("A.0/0", "A.0/1", "B.0/0")
    assert wanted(two) is None


def test_a_slow_machine_gets_fewer_layers() -> None:
    slow = job(guest=False)
    slow = replace(slow, membership=replace(slow.membership, pace=Map({"B.0/0": 3000})))
    assert wanted(slow, by_pace=True) == (4, 1, 4)
    assert wanted(slow) is None  # --stragglers warn
    fast = job(guest=False, current=(4, 1, 4), since=4, changes=1)
    assert wanted(fast, by_pace=True) == (3, 3, 3)


def test_layers_go_back_once_each_machine_has_one_worker() -> None:
    moved: dict[str, Any] = {"current": (2, 2, 5), "since": 8, "changes": 1}
    assert wanted(job(guest=False, **moved)) == (3, 3, 3)
    assert wanted(job(guest=False)) is None


@pytest.mark.parametrize(
    ("state", "iteration"),
    [
        (job(current=(2, 2, 5)), 11),  # as it should be
        (job(pending=PendingLayout(12, (2, 2, 5))), 11),  # on its way
        (job(declined=frozenset({(2, 2, 5)})), 11),
        (job(), 10),  # the first iteration after the loss
        (job(), 57),  # it does not pay any more
        (job(guest=False, current=(2, 2, 5), since=8, changes=3), 15),  # machines come and go
    ],
)
def test_nothing_moves(state: State, iteration: int) -> None:
    assert wanted(state, iteration) is None


def test_nothing_moves_before_all_have_measured() -> None:
    assert wanted(job(), known=False) is None
