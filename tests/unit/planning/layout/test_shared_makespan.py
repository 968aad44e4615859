"""The time of an iteration when stages share a machine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.costs.schedule_orders import Schedule
from swift_ft.planning.layout.makespan import StageTime, makespan_ns
from swift_ft.planning.layout.shared_makespan import shared_makespan_ns

SIZES = [
    (Schedule.GPIPE, 3, 1),
    (Schedule.ONE_F_ONE_B, 3, 1),
    (Schedule.LOOPED_BFS, 3, 2),
    (Schedule.INTERLEAVED, 3, 2),
    (Schedule.ZERO_BUBBLE, 3, 2),
    (Schedule.ZBV, 3, 2),
    (Schedule.DUAL_PIPE_V, 3, 2),
]
TIMES = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 90)), min_size=6, max_size=6)


@pytest.mark.parametrize(("schedule", "workers", "chunks"), SIZES)
@settings(deadline=None)
@given(times=TIMES)
def test_with_a_machine_for_each_worker_it_is_the_makespan(
    schedule: Schedule, workers: int, chunks: int, times: list[tuple[int, int]]
) -> None:
    stages = [StageTime(*one) for one in times[: workers * chunks]]
    worker_of = {s: w for w in range(workers) for s in own_stages(schedule, w, workers, chunks)}
    machines = [worker_of[stage] for stage in range(len(stages))]
    assert shared_makespan_ns(stages, machines, 6, schedule, workers=workers) == makespan_ns(
        stages, 6, schedule, workers=workers
    )


@pytest.mark.parametrize(("schedule", "workers", "chunks"), SIZES)
@settings(deadline=None)
@given(times=TIMES)
def test_on_one_machine_it_is_the_sum(
    schedule: Schedule, workers: int, chunks: int, times: list[tuple[int, int]]
) -> None:
    stages = [StageTime(*one) for one in times[: workers * chunks]]
    total = 6 * sum(stage.compute_ns for stage in stages)
    assert shared_makespan_ns(stages, ["a"] * len(stages), 6, schedule, workers=workers) == total


@settings(deadline=None)
@given(times=TIMES)
def test_between_the_two(times: list[tuple[int, int]]) -> None:
    stages = [StageTime(*one) for one in times]
    alone = makespan_ns(stages, 8)
    shared = shared_makespan_ns(stages, "aabcde", 8)
    busiest = 8 * max(sum(s.compute_ns for s in stages[:2]), *(s.compute_ns for s in stages[2:]))
    assert max(alone, busiest) <= shared <= 8 * sum(stage.compute_ns for stage in stages)


def test_by_hand() -> None:
    """The machine of the first and the last stage has to choose at 2, at 8 and at 9."""
    stages = [StageTime(1, 1)] * 3
    assert makespan_ns(stages, 3, Schedule.GPIPE) == 10
    assert shared_makespan_ns(stages, "aba", 3, Schedule.GPIPE) == 12


def own_stages(schedule: Schedule, worker: int, workers: int, chunks: int) -> list[int]:
    if schedule.is_v:
        return [worker, 2 * workers - 1 - worker]
    return [chunk * workers + worker for chunk in range(chunks)]
