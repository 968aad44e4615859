"""The time of an iteration with other numbers of machines."""

from __future__ import annotations

from swift_ft.costs.job import Measured, Worker
from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.costs.next_world import ORDINARY, Pipelines, change_ns, of_layers, of_replicas
from swift_ft.costs.schedule_orders import Schedule

TWELVE = [LayerProfile(1, 1, 0)] * 12
PLACED = {0: range(6), 1: range(6, 12)}
ALONE = {0: ORDINARY, 1: ORDINARY}
SHAPE = Pipelines(Schedule.ONE_F_ONE_B, microbatches=8)


def test_layers_are_dealt_evenly() -> None:
    """24 for all, and 7 times the slowest stage: 12 of two, 8 of three."""
    found = of_layers(TWELVE, SHAPE, PLACED, ALONE, now_ns=1080, most=4)
    assert found == {1: 10 * (24 + 7 * 24), 2: 1080, 3: 10 * (24 + 7 * 8), 4: 10 * (24 + 7 * 6)}


def test_a_machine_that_runs_two_workers_takes_twice_as_long() -> None:
    """Both stages are on one machine now: alone on two machines each would take half as long."""
    found = of_layers(TWELVE, SHAPE, PLACED, {0: 2 * ORDINARY, 1: 2 * ORDINARY}, now_ns=1000, most=2)
    assert found[2] == 500


def test_numbers_that_torch_or_the_pipelines_cannot_have() -> None:
    """One stage for each microbatch at least, equal pipelines, and a layer for each stage."""
    few = Pipelines(Schedule.ONE_F_ONE_B, microbatches=3)
    assert max(of_layers(TWELVE, few, PLACED, ALONE, now_ns=1, most=9)) == 3
    twice = Pipelines(Schedule.ONE_F_ONE_B, microbatches=8, count=2)
    placed = {0: range(12), 1: range(12)}
    assert [*of_layers(TWELVE, twice, placed, ALONE, now_ns=1, most=5)] == [2, 4]
    assert max(of_layers(TWELVE, SHAPE, PLACED, ALONE, now_ns=1, most=99)) == 8
    unknown = Pipelines(None, microbatches=8)
    assert not of_layers(TWELVE, unknown, PLACED, ALONE, now_ns=1, most=4)


def test_workers_with_several_stages() -> None:
    for schedule in (Schedule.INTERLEAVED, Schedule.ZBV):
        shape = Pipelines(schedule, microbatches=8, stages_per_worker=2)
        found = of_layers(TWELVE, shape, PLACED, ALONE, now_ns=1080, most=3)
        assert (found[1], found[2]) == (10 * (24 + 7 * 24), 1080)


def test_replicas_divide_their_own_work_only() -> None:
    assert of_replicas(own_ns=600, now_ns=700, machines=2, most=3) == {1: 1300, 2: 700, 3: 500}


def test_a_change_takes_as_long_as_the_largest_state() -> None:
    slow = Measured(state_bytes=1000, save_bytes_per_s=100, link_bytes_per_s=200)
    quick = Measured(state_bytes=1000, save_bytes_per_s=1000)
    workers = [Worker((), measured=slow), Worker((), measured=quick), Worker(())]
    assert change_ns(workers) == 15_500_000_000
    assert change_ns(()) == 500_000_000
