"""The suite for schedules passes those of torch and subclasses of them, and fails others."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from swift_ft.config import extensions
from swift_ft.costs.schedule_orders import Schedule
from swift_ft.errors import UsageError
from swift_ft.extend import register_schedule
from swift_ft.testing import ScheduleConformanceTests
from swift_ft.torch_adapters.pipelining import schedule_order
from swift_ft.torch_adapters.pipelining.schedule_order import kind_of


class Quiet1F1B(schedules.Schedule1F1B):
    """As people write them: the same order, and something of their own around it."""


class QuietInterleaved(schedules.ScheduleInterleaved1F1B):
    """As above, with several stages per worker."""


class Backwards(schedules.ScheduleGPipe):
    """Computes the last microbatch first: in an order that no replay knows."""

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        for index in reversed(range(self._n_microbatches)):
            self._stage.forward_one_chunk(index, (), {})
        for index in reversed(range(self._n_microbatches)):
            self._stage.backward_one_chunk(index, loss=None)


class LeavesOneOut(schedules.ScheduleGPipe):
    """Computes no gradients of the first microbatch."""

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        for index in range(self._n_microbatches):
            self._stage.forward_one_chunk(index, (), {})
        for index in range(1, self._n_microbatches):
            self._stage.backward_one_chunk(index, loss=None)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone after it."""
    monkeypatch.setattr(schedule_order, "_registered", {})
    extensions.load_once.cache_clear()
    register_schedule(Quiet1F1B, like=Schedule.ONE_F_ONE_B)
    register_schedule(QuietInterleaved, like=Schedule.INTERLEAVED)
    yield
    extensions.load_once.cache_clear()


class TestGPipe(ScheduleConformanceTests):
    schedule = schedules.ScheduleGPipe
    like = "gpipe"


class TestQuiet1F1B(ScheduleConformanceTests):
    schedule = Quiet1F1B
    like = "1f1b"


class TestQuietInterleaved(ScheduleConformanceTests):
    schedule = QuietInterleaved
    like = "interleaved-1f1b"


class TestZeroBubble(ScheduleConformanceTests):
    schedule = schedules.ScheduleInterleavedZeroBubble
    like = "zero-bubble"


def suite(kind: type[Any], named: str | None = None) -> ScheduleConformanceTests:
    class Suite(ScheduleConformanceTests):
        schedule = kind
        like = named

    return Suite()


def test_another_order_is_not_that_of_the_plans() -> None:
    register_schedule(Backwards, like=Schedule.GPIPE)
    with pytest.raises(AssertionError):
        suite(Backwards, "gpipe").test_it_computes_what_is_planned()
    suite(Backwards).test_each_microbatch_goes_forward_and_back_once()


def test_another_order_of_gradients_is_found() -> None:
    with pytest.raises(AssertionError):
        suite(Backwards).test_helpers_add_gradients_up_in_its_order()


def test_a_microbatch_that_is_left_out_is_found() -> None:
    with pytest.raises(AssertionError):
        suite(LeavesOneOut).test_each_microbatch_goes_forward_and_back_once()


def test_the_order_of_another_schedule_is_found() -> None:
    register_schedule(Quiet1F1B, like=Schedule.GPIPE)
    with pytest.raises(AssertionError):
        suite(Quiet1F1B, "gpipe").test_it_computes_what_is_planned()


def test_one_that_is_not_registered_is_named() -> None:
    with pytest.raises(AssertionError, match="is it registered"):
        suite(Backwards, "gpipe").test_it_computes_what_is_planned()


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(UsageError, match="takes a subclass of a schedule"):
        register_schedule(dict, like=Schedule.GPIPE)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="like= must be one of gpipe, 1f1b"):
        register_schedule(Backwards, like="mine")  # type: ignore[arg-type]


def test_a_package_brings_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", f"{__name__}:_bring", extensions.Extensions.SCHEDULES)
    monkeypatch.setattr(extensions, "entry_points", lambda *, group: [entry] if "schedules" in group else [])
    made = Backwards.__new__(Backwards)
    assert kind_of(made) is Schedule.GPIPE
    assert kind_of(schedules.ScheduleGPipe.__new__(schedules.ScheduleGPipe)) is Schedule.GPIPE


def _bring() -> None:
    register_schedule(Backwards, like=Schedule.GPIPE)
