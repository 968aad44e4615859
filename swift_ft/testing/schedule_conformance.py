"""The conformance suite for a schedule of your own.

from swift_ft.testing import ScheduleConformanceTests

class TestMySchedule(ScheduleConformanceTests):
    schedule = MySchedule
    like = "1f1b"       # if it is registered: swift_ft.extend.register_schedule(MySchedule, like="1f1b")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from swift_ft.costs.schedule_orders import Action, Kind, Schedule, check_size, worker_order
from swift_ft.errors import UsageError
from swift_ft.torch_adapters.pipelining.computed_order import computed_order
from swift_ft.torch_adapters.pipelining.schedule_order import ComputeOrder, kind_of


class ScheduleConformanceTests:
    """Inherit from it and name the class of the schedule.

    Attributes:
        schedule: a subclass of a schedule of ``torch.distributed.pipelining``.
        like: the schedule of torch that it is registered as; None if it is not to be planned with.
        workers: numbers of workers to try.
        chunks: numbers of stages per worker to try.
        microbatches: numbers of microbatches to try. The schedule may refuse some.
    """

    schedule: ClassVar[type[Any]]
    like: ClassVar[str | None] = None
    workers: ClassVar[tuple[int, ...]] = (1, 2, 3, 4)
    chunks: ClassVar[tuple[int, ...]] = (1, 2)
    microbatches: ClassVar[tuple[int, ...]] = (1, 2, 3, 4, 6, 8, 12)

    def _orders(self) -> Iterator[tuple[dict[str, int], dict[int, list[Action]], Any]]:
        """The sizes that the schedule takes, and its order for each."""
        taken = 0
        for workers in self.workers:
            for chunks in self.chunks:
                for microbatches in self.microbatches:
                    size = {"workers": workers, "chunks": chunks, "microbatches": microbatches}
                    try:
                        orders, made = computed_order(self.schedule, **size)
                    except ValueError:
                        continue
                    taken += 1
                    yield size, orders, made
        assert taken, f"{self.schedule.__name__} takes none of these sizes"

    def test_each_microbatch_goes_forward_and_back_once(self) -> None:
        """A replay computes the lost stages' share of an iteration: nothing twice, nothing left out."""
        for size, orders, _ in self._orders():
            stages = size["workers"] * size["chunks"]
            done = Counter(action for order in orders.values() for action in order)
            assert set(done.values()) == {1}, size
            for stage in range(stages):
                for microbatch in range(size["microbatches"]):
                    kinds = {kind for kind in Kind if (kind, stage, microbatch) in done}
                    whole = {Kind.FORWARD, Kind.BACKWARD}
                    assert kinds in (whole, {Kind.FORWARD, Kind.INPUT, Kind.WEIGHT}), (
                        size,
                        stage,
                        microbatch,
                    )

    def test_no_gradient_comes_before_its_output(self) -> None:
        for size, orders, _ in self._orders():
            for order in orders.values():
                place = {action: index for index, action in enumerate(order)}
                for kind, stage, microbatch in order:
                    if kind in (Kind.BACKWARD, Kind.INPUT):
                        assert (
                            place[Action(Kind.FORWARD, stage, microbatch)]
                            < place[Action(kind, stage, microbatch)]
                        ), size
                    if kind is Kind.WEIGHT:
                        assert (
                            place[Action(Kind.INPUT, stage, microbatch)]
                            < place[Action(kind, stage, microbatch)]
                        ), size

    def test_helpers_add_gradients_up_in_its_order(self) -> None:
        """Survivors that help in a replay add up in the order that the schedule would have: equal bits."""
        for size, orders, made in self._orders():
            places = {action.stage: worker for worker, order in orders.items() for action in order}
            known = ComputeOrder(made, places)
            for stage, worker in places.items():
                added = [
                    action.microbatch
                    for action in orders[worker]
                    if action.stage == stage and action.kind in (Kind.BACKWARD, Kind.WEIGHT)
                ]
                assert list(known.added(stage)) == added, (size, stage)

    def test_it_computes_what_is_planned(self) -> None:
        """Plans and layouts that move time the order of the schedule that it is registered as."""
        if self.like is None:
            pytest.skip(f"{self.schedule.__name__} is not registered: plans do without it")
        like = Schedule(self.like)
        for size, orders, made in self._orders():
            assert kind_of(made) is like, "is it registered? swift_ft.extend.register_schedule(...)"
            try:
                check_size(like, **size)
            except UsageError as error:
                raise AssertionError(f"{self.schedule.__name__} takes {size}, and {error}") from None
            for worker, order in orders.items():
                assert worker_order(like, worker, **size) == order, (size, worker)
