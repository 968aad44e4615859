"""Random plans: the same for the same seed, within the job, and readable by ``--inject``."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from swift_ft.errors import UsageError
from swift_ft.faults import Action, Fault, Target, parse_faults
from swift_ft.faults.failpoints import Point
from swift_ft.faults.fault import ALL, OF_CHANGES, OF_NETWORKS, OF_STORES
from swift_ft.testing.chaos.kinds import kinds, weights_of
from swift_ft.testing.chaos.plans import WEIGHTS, Shape, random_plan

SHAPE = Shape(machines=3, workers=2, iterations=8, microbatches=4, most=3)
PLANS = [random_plan(SHAPE, seed) for seed in range(500)]


def test_a_seed_is_a_plan() -> None:
    assert [random_plan(SHAPE, seed) for seed in range(500)] == PLANS
    assert len(set(PLANS)) > 400


def test_faults_are_within_the_job() -> None:
    for plan in PLANS:
        assert 1 <= len(plan) <= 3
        for fault in plan:
            assert 0 <= fault.index < (6 if fault.target == Target.WORKER else 3)
            once = fault.point in (Point.START, Point.END)
            assert fault.iteration is None if once else fault.iteration in range(8)
            assert fault.microbatch is None or 0 <= fault.microbatch < 4
        assert parse_faults("; ".join(map(str, plan))) == plan


NOT_DRAWN = {Point.VERIFY, Point.PREPARED, Point.OFFER, Point.TAKE}


def test_all_kinds_are_drawn() -> None:
    """Without ``raise``, a script's own failure, verified steps, and changes of worlds."""
    plans = [random_plan(replace(SHAPE, copies=True), seed) for seed in range(500)]
    assert any(plan[0].point == Point.COPY for plan in plans)
    assert {fault.point for plan in plans for fault in plan} == set(Point) - NOT_DRAWN
    faults = [fault for plan in PLANS for fault in plan]  # of a script without copies
    assert set(Counter(fault.action for fault in faults)) == set(WEIGHTS)
    assert set(Counter(fault.target for fault in faults)) == set(Target)
    assert set(Counter(fault.point for fault in faults)) == set(Point) - {Point.COPY} - NOT_DRAWN
    assert len(Counter(len(plan) for plan in PLANS)) == 3


def test_all_kinds_that_are_asked_for_are_drawn_and_can_be_read() -> None:
    weights = weights_of(["all"]) | dict.fromkeys(OF_NETWORKS, 1)  # as where a host has networks
    everything = replace(SHAPE, weights=weights, copies=True)
    plans = [random_plan(everything, seed) for seed in range(500)]
    faults = [fault for plan in plans for fault in plan]
    assert {fault.action for fault in faults} == set(Action) - {Action.RAISE}
    in_a_change = {Point.PREPARED, Point.OFFER, Point.TAKE}
    assert in_a_change < {fault.point for fault in faults}
    assert {fault.iteration for fault in faults if fault.point in in_a_change} == {None}  # the first there is
    for plan in plans:
        first = next((i for i, fault in enumerate(plan) if fault.action in OF_CHANGES), len(plan))
        assert not any(fault.point in in_a_change for fault in plan[: first + 1])
    changes = [fault for fault in faults if fault.action in OF_CHANGES]
    assert {fault.point for fault in changes} <= {
        *(Point.FORWARD, Point.BACKWARD, Point.OPTIMIZER, Point.BETWEEN)
    }
    of_stores = [fault for fault in faults if fault.action in OF_STORES]
    assert {fault.target for fault in of_stores} == {Target.MACHINE, Target.WORKER}
    assert {fault.index == ALL for fault in of_stores} == {True, False}
    assert {fault.calls for fault in of_stores} == {1, 3, None}
    assert any(fault.peer not in (None, fault.index) for fault in faults)
    assert all(parse_faults("; ".join(map(str, plan))) == plan for plan in plans)
    assert {kind.name for kind in kinds()} == {*map(str, Action)} - {"raise"}
    assert not OF_NETWORKS & weights_of(["all"]).keys()
    assert weights_of(["store"]).keys() > OF_STORES
    assert weights_of(["change"]).keys() == OF_CHANGES
    with pytest.raises(UsageError, match="there is no fault 'fire': --list-faults shows all"):
        weights_of(["kill", "fire"])


def test_of_a_known_run_only_what_it_passes_is_drawn() -> None:
    passed = frozenset({"optimizer", "between", "checkpoint", "start", "end", "verify"})
    known = replace(SHAPE, points=passed, checkpoints=(0, 4, 8))
    plans = [random_plan(known, seed) for seed in range(300)]
    assert {plan[0].point for plan in plans} == passed
    faults = [fault for plan in plans for fault in plan]
    assert {fault.iteration for fault in faults if fault.point == Point.CHECKPOINT} == {0, 4, 8}
    assert random_plan(known, 5, attempt=1) == random_plan(known, 5, attempt=1) != random_plan(known, 5)


def test_connections_are_broken_only_where_a_worker_has_some() -> None:
    plans = [random_plan(replace(SHAPE, weights={Action.BREAK: 1, Action.RELOAD: 1}), n) for n in range(500)]
    points = {fault.point for plan in plans for fault in plan if fault.action == Action.BREAK}
    without = {Point.START, Point.LEAVE, Point.REPORT, Point.LOAD, Point.JOIN}
    assert points == set(Point) - without - {Point.COPY} - NOT_DRAWN


def test_the_first_fault_needs_no_earlier_one() -> None:
    recovery = {Point.LEAVE, Point.REPORT, Point.JOIN, Point.LOAD, Point.MOVE, Point.TRANSFER}
    recovery |= {Point.REPLAY, Point.HELP}
    assert not any(plan[0].point in recovery for plan in PLANS)
    all_there_is = replace(SHAPE, points=frozenset(map(str, Point)))
    plans = [random_plan(all_there_is, seed) for seed in range(300)]
    assert not any(plan[0].point in recovery for plan in plans)
    later = [fault for plan in plans for fault in plan[1:] if fault.point in recovery]
    assert {fault.point for fault in later} == recovery
    assert {fault.iteration for fault in later} == {None}


@pytest.mark.parametrize("point", [Point.LOAD, Point.REPLAY])
def test_most_faults_of_a_replacement_are_aimed_at_it(point: Point) -> None:
    plans = [plan for seed in range(6000) if len(plan := random_plan(SHAPE, seed)) == 2]
    pairs = [plan for plan in plans if plan[1].point == point]
    assert len(pairs) > 40
    aimed = [plan for plan in pairs if _machine(plan[0]) == _machine(plan[1])]
    assert 0.6 < len(aimed) / len(pairs) < 1  # one in three by chance
    assert {fault.index for _, fault in pairs if fault.target == Target.WORKER} == {*range(6)}


def _machine(fault: Fault) -> int:
    return fault.index // (2 if fault.target == Target.WORKER else 1)
