"""Which failures interrupt a step: those of its communication, in its threads, since it began."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from swift_ft.errors import DivergenceError, UsageError
from swift_ft.torch_adapters.step_failures import StepFailures

BROKEN = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer\nand more")


def test_a_broken_connection_is_noted_until_the_next_step() -> None:
    failures = StepFailures()
    failures.note(BROKEN)
    failures.note(RuntimeError("another one, later"), is_over=True)
    assert failures.cause == "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    failures.begin()
    assert failures.cause is None


@pytest.mark.parametrize(
    "error",
    [
        *(RuntimeError("Invalid scalar type"), ValueError("tensors must be contiguous"), TypeError()),
        torch.distributed.DistBackendError("NCCL error: ncclInvalidUsage: Duplicate GPU detected"),
    ],
)
def test_an_argument_that_torch_does_not_take_is_not(error: Exception) -> None:
    failures = StepFailures()
    failures.note(error)
    assert failures.cause is None
    failures.note(error, is_over=True)  # it would have failed anyway
    assert failures.cause is not None


def test_an_error_of_our_own_is_kept_itself() -> None:
    failures = StepFailures()
    first = DivergenceError("other bits")
    failures.note(first)
    failures.note(UsageError("a consequence"))
    assert failures.error is first
    assert failures.cause is None
    failures.begin()
    assert failures.error is None


def test_what_a_thread_of_the_script_does_is_of_no_step() -> None:
    failures = StepFailures()
    thread = threading.Thread(target=failures.note, args=(BROKEN,))
    thread.start()
    thread.join()
    assert failures.cause is None


@pytest.mark.parametrize("late", [False, True])
def test_a_future_counts_for_the_step_that_it_is_of(late: bool) -> None:
    failures = StepFailures()
    failures.begin()
    future: torch.futures.Future[Any] = torch.futures.Future()
    failures.watch(future)
    if late:
        failures.begin()
    future.set_exception(BROKEN)
    assert (failures.cause is None) == late


def test_a_future_that_succeeds_is_no_failure() -> None:
    failures = StepFailures()
    future: torch.futures.Future[int] = torch.futures.Future()
    failures.watch(future)
    future.set_result(3)
    assert future.value() == 3
    assert failures.cause is None
