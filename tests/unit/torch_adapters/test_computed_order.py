"""The order in which a schedule makes stages compute, by stages that compute nothing."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules

from swift_ft.costs.schedule_orders import Action
from swift_ft.torch_adapters.pipelining.computed_order import computed_order


def in_words(order: list[Action]) -> str:
    return " ".join(f"{action.kind}{action.microbatch}" for action in order)


def test_one_stage_per_worker() -> None:
    orders, _ = computed_order(schedules.Schedule1F1B, workers=2, chunks=1, microbatches=3)
    assert in_words(orders[0]) == "F0 F1 B0 F2 B1 B2"
    assert in_words(orders[1]) == "F0 B0 F1 B1 F2 B2"


def test_several_stages_per_worker() -> None:
    orders, made = computed_order(schedules.ScheduleInterleaved1F1B, workers=2, chunks=2, microbatches=2)
    assert {action.stage for action in orders[1]} == {1, 3}
    assert isinstance(made, schedules.ScheduleInterleaved1F1B)


def test_sizes_that_are_refused() -> None:
    with pytest.raises(ValueError, match="one stage per worker, not 2"):
        computed_order(schedules.ScheduleGPipe, workers=2, chunks=2, microbatches=2)
