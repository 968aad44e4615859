"""The training thread waits for messages, and an abort ends that even where gloo forgets to."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from swift_ft.host.alarms import alarms
from swift_ft.torch_adapters import abortable_waits as waits
from swift_ft.torch_adapters.comm_errors import is_broken_communication


class Work:
    """Ends when the test says so, if ever."""

    def __init__(self, error: BaseException | None = None, *, ends: bool = True) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self._error = error
        if ends:
            self.may_end.set()

    def wait(self) -> None:
        self.begun.set()
        self.may_end.wait()
        if self._error is not None:
            raise self._error


def test_it_waits_for_all_in_their_order() -> None:
    works = [Work(), Work()]
    waits.AbortableWaits().wait_or_abort(works)  # type: ignore[arg-type]
    assert all(work.begun.is_set() for work in works)
    waits.AbortableWaits().wait_or_abort([])


def test_what_it_raises_is_a_broken_connection() -> None:
    """One from C++, as gloo's are; the test's own has a frame of its own, and is the user's."""
    work = Work()
    work.wait = functools.partial(torch.zeros(2).reshape, 3)  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="invalid for input") as caught:
        waits.AbortableWaits().wait_or_abort([work])  # type: ignore[list-item]
    assert is_broken_communication(caught.value)
    with pytest.raises(RuntimeError, match="the user's") as caught:
        waits.AbortableWaits().wait_or_abort([Work(RuntimeError("the user's"))])  # type: ignore[list-item]
    assert not is_broken_communication(caught.value)


@pytest.mark.parametrize("works", [[], [Work()]], ids=["nothing to wait for", "what is there already"])
def test_no_schedule_computes_on_in_a_generation_that_is_over(works: list[Work]) -> None:
    """What it waits for may have come before the loss: it would compute one piece more."""
    over = False
    one = waits.AbortableWaits(lambda: over)
    one.wait_or_abort(works)  # type: ignore[arg-type]
    over = True
    with pytest.raises(RuntimeError, match="cancelled") as caught:
        one.wait_or_abort(works)  # type: ignore[arg-type]
    assert is_broken_communication(caught.value)


def test_a_wait_that_never_ends_is_ended_by_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_GRACE_S", 0.0)
    one, stuck = waits.AbortableWaits(), Work(ends=False)

    def abort() -> None:
        stuck.begun.wait(60)
        one.abort()

    aborting = threading.Thread(target=abort)
    aborting.start()
    with pytest.raises(RuntimeError, match="connections were aborted") as caught:
        one.wait_or_abort([stuck])  # type: ignore[list-item]
    aborting.join(60)
    assert is_broken_communication(caught.value)
    one.renew()
    one.wait_or_abort([Work()])  # type: ignore[list-item]  # with another thread
    stuck.may_end.set()


def test_a_wait_that_ends_by_itself_tells_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_GRACE_S", 3600.0)
    one = waits.AbortableWaits()
    work = Work(RuntimeError("the transport's own words"), ends=False)

    def abort() -> None:
        work.begun.wait(60)
        one.abort()
        work.may_end.set()

    aborting = threading.Thread(target=abort)
    aborting.start()
    with pytest.raises(RuntimeError, match="own words"):
        one.wait_or_abort([work])  # type: ignore[list-item]
    aborting.join(60)


def test_a_call_that_takes_too_long_is_left_to_itself() -> None:
    one, stuck = waits.AbortableWaits(), Work(ends=False)
    with pytest.raises(RuntimeError, match=r"no answer within 0\.05 s"):
        one.call_or_abort(stuck.wait, 0.05)
    other = Work()
    one.call_or_abort(other.wait, 60.0)  # with another thread
    assert other.begun.is_set()
    stuck.may_end.set()


def test_a_call_that_an_abort_has_missed_does_not_begin() -> None:
    one, work = waits.AbortableWaits(), Work(ends=False)
    one.abort()
    with pytest.raises(RuntimeError, match="cancelled before"):
        one.call_or_abort(work.wait, is_cancelled=lambda: True)
    assert not work.begun.is_set()


def test_after_an_abort_what_is_there_already_is_still_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_GRACE_S", 3600.0)
    one = waits.AbortableWaits()
    one.abort()
    one.wait_or_abort([Work()])  # type: ignore[list-item]


def test_a_wait_that_begins_after_the_abort_and_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operation began before."""
    monkeypatch.setattr(waits, "_GRACE_S", 0.0)
    one, stuck = waits.AbortableWaits(), Work(ends=False)
    one.abort()
    with pytest.raises(RuntimeError, match="connections were aborted"):
        one.call_or_abort(stuck.wait)
    stuck.may_end.set()


def test_other_connections_are_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_GRACE_S", 0.0)
    one, work = waits.AbortableWaits(), Work(ends=False)
    one.abort()
    one.renew()
    ending = threading.Timer(0.1, work.may_end.set)
    ending.start()
    one.call_or_abort(work.wait)
    ending.join(60)


def test_nothing_holds_on_to_the_operations() -> None:
    """Or the group would never go away, and neighbours wait for the end of its connections."""
    one, work = waits.AbortableWaits(), Work(RuntimeError("broken"))
    watched = weakref.ref(work)
    with pytest.raises(RuntimeError):
        one.wait_or_abort([work])  # type: ignore[list-item]
    one.wait_or_abort([Work()])  # type: ignore[list-item]  # whose turn releases the frame of the last one
    del work
    gc.collect()
    assert watched() is None


def test_schedules_wait_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_wait_batch_p2p", schedules._wait_batch_p2p)  # put back afterwards
    seen: list[list[dist.Work]] = []
    one = waits.AbortableWaits()
    monkeypatch.setattr(one, "wait_or_abort", seen.append)
    one.install()
    schedules._wait_batch_p2p([])
    assert seen == [[]]


def test_what_a_silent_abort_has_ended_gave_nothing() -> None:
    """Over NCCL, an abort raises nothing where an operation is waited for."""
    one = waits.AbortableWaits()
    one.silent = True
    one.wait_or_abort([Work()])  # type: ignore[list-item]
    one.abort()
    with pytest.raises(RuntimeError, match="was aborted") as caught:
        one.wait_or_abort([Work()])  # type: ignore[list-item]
    assert is_broken_communication(caught.value)
    one.renew()
    one.wait_or_abort([Work()])  # type: ignore[list-item]


def test_a_wait_whose_operation_has_no_deadline_has_ours() -> None:
    one, stuck = waits.AbortableWaits(), Work(ends=False)
    one.limit_s = 0.05
    with pytest.raises(RuntimeError, match=r"no answer within 0\.05 s") as caught:
        one.wait_or_abort([stuck])  # type: ignore[list-item]
    assert is_broken_communication(caught.value)
    stuck.may_end.set()


# A collective completes its future by itself.


def test_a_future_is_awaited_without_another_thread() -> None:
    one, future = waits.AbortableWaits(), torch.futures.Future[None]()
    ending = threading.Timer(0.05, future.set_result, [None])
    ending.start()
    one.completed_or_abort(future)
    assert future.done()
    ending.join(60)
    one.completed_or_abort(future)  # which is there already
    assert one._requests is None


def test_a_future_that_fails_is_complete() -> None:
    """What has failed is asked of the operation itself."""
    one, future = waits.AbortableWaits(), torch.futures.Future[Any]()
    future.set_exception(RuntimeError("Connection closed by peer"))
    one.completed_or_abort(future)


@pytest.mark.parametrize("first", ["the wait", "the abort"])
def test_a_future_that_never_completes_is_ended_by_an_abort(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "_GRACE_S", 0.0)
    one, begun = waits.AbortableWaits(), threading.Event()

    class Stuck(torch.futures.Future[None]):
        def add_done_callback(self, callback: Any) -> None:
            super().add_done_callback(callback)
            begun.set()

    def abort() -> None:
        begun.wait(60)
        one.abort()

    if first == "the abort":
        begun.set()
        abort()
    aborting = threading.Thread(target=abort)
    aborting.start()
    stuck = Stuck()
    with pytest.raises(RuntimeError, match="connections were aborted") as caught:
        one.completed_or_abort(stuck)
    aborting.join(60)
    assert is_broken_communication(caught.value)
    one.renew()
    stuck.set_result(None)  # much later, and in nobody's way: the next wait is its own
    one.limit_s = 0.05
    with pytest.raises(RuntimeError, match=r"no answer within 0\.05 s") as caught:
        one.completed_or_abort(torch.futures.Future())
    assert is_broken_communication(caught.value)
    one.call_or_abort(Work().wait, 60.0)


def test_an_abort_rings_for_a_wait_that_is_over_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was to give up the one before, which has ended in time."""
    rings: list[Callable[[], None]] = []
    monkeypatch.setattr(alarms, "after", lambda _, function: rings.append(function))
    one, ended, later = waits.AbortableWaits(), torch.futures.Future[None](), torch.futures.Future[None]()
    one.abort()
    ended.set_result(None)
    one.completed_or_abort(ended)
    one.renew()
    (ring,) = rings
    ending = threading.Timer(0.05, later.set_result, [None])
    ring()
    ending.start()
    one.completed_or_abort(later)
    ending.join(60)
