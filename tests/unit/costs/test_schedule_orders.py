"""The orders of actions are those of torch's schedules, and torch's demands on sizes are known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping

from swift_ft.costs.schedule_orders import Kind, Schedule, check_size, in_flight, stages_of, worker_order
from swift_ft.errors import UsageError
from swift_ft.torch_adapters.pipelining.computed_order import computed_order

OF_TORCH: dict[Schedule, Any] = {
    Schedule.GPIPE: schedules.ScheduleGPipe,
    Schedule.ONE_F_ONE_B: schedules.Schedule1F1B,
    Schedule.LOOPED_BFS: schedules.ScheduleLoopedBFS,
    Schedule.INTERLEAVED: schedules.ScheduleInterleaved1F1B,
    Schedule.ZERO_BUBBLE: schedules.ScheduleInterleavedZeroBubble,
    Schedule.ZBV: schedules.ScheduleZBVZeroBubble,
    Schedule.DUAL_PIPE_V: schedules.ScheduleDualPipeV,
}


def sizes() -> Iterator[tuple[Schedule, int, int, int]]:
    for schedule in Schedule:
        for workers in (1, 2, 3, 4, 5, 8):
            for chunks in (1,) if schedule.is_single else (1, 2, 3):
                for microbatches in (1, 2, 3, 4, 6, 8, 9, 10, 12, 16, 17, 25, 32):
                    yield schedule, workers, chunks, microbatches


@pytest.mark.parametrize("schedule", list(Schedule))
def test_orders_are_those_of_torch(schedule: Schedule) -> None:
    compared = refused = 0
    for _, workers, chunks, microbatches in (size for size in sizes() if size[0] is schedule):
        try:
            expected, _ = computed_order(
                OF_TORCH[schedule], workers=workers, chunks=chunks, microbatches=microbatches
            )
        except ValueError:
            with pytest.raises(UsageError):
                check_size(schedule, workers=workers, chunks=chunks, microbatches=microbatches)
            refused += 1
            continue
        for worker in range(workers):
            found = worker_order(schedule, worker, workers=workers, chunks=chunks, microbatches=microbatches)
            assert found == expected[worker], (workers, chunks, microbatches)
        compared += 1
    assert compared >= 30
    assert refused or schedule in (Schedule.GPIPE, Schedule.LOOPED_BFS)


@pytest.mark.parametrize("schedule", [one for one in Schedule if not one.is_single])
def test_stages_are_placed_as_torch_places_them(schedule: Schedule) -> None:
    style = "v" if schedule.is_v else "loop"
    for workers in (1, 2, 3, 5):
        placed = {one: stages_of(schedule, one, workers=workers, chunks=2) for one in range(workers)}
        assert placed == generate_rank_to_stage_mapping(workers, 2 * workers, style=style)


@pytest.mark.parametrize(
    "schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE]
)
def test_microbatches_in_flight_are_those_of_the_order(schedule: Schedule) -> None:
    for workers, microbatches in ((1, 1), (1, 4), (3, 3), (3, 6), (4, 4), (4, 12), (5, 20), (8, 16)):
        for worker in range(workers):
            held = most = 0
            for action in worker_order(schedule, worker, workers=workers, microbatches=microbatches):
                held += {Kind.FORWARD: 1, Kind.INPUT: 0}.get(action.kind, -1)
                most = max(most, held)
            assert in_flight(schedule, worker, workers=workers, microbatches=microbatches) == most


@pytest.mark.parametrize(
    ("schedule", "size", "message"),
    [
        (Schedule.GPIPE, (2, 2, 4), "takes one stage per worker, not 2"),
        (Schedule.ONE_F_ONE_B, (4, 1, 3), "3 are 1 too few for 4 stages"),
        (Schedule.INTERLEAVED, (4, 2, 9), "into 2 rounds, and 1 are over: 8 would do"),
        (Schedule.ZBV, (2, 1, 4), "takes 2 stages per worker, not 1: 4 stages on 2 workers"),
        (Schedule.DUAL_PIPE_V, (4, 2, 7), "7 are 1 too few for 8 stages"),
        (Schedule.ZERO_BUBBLE, (0, 1, 1), "each must be at least 1"),
    ],
)
def test_a_size_that_torch_refuses_is_explained(
    schedule: Schedule, size: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_size(schedule, workers=size[0], chunks=size[1], microbatches=size[2])
