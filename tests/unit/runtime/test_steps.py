"""What the end of `with step:` makes of the errors in it, also of those that do not reach it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from swift_ft.errors import DivergenceError, UsageError
from swift_ft.runtime.script.script_phases import ScriptPhases
from swift_ft.runtime.steps import Step
from swift_ft.torch_adapters.abortable_waits import ABORTED, AbortableWaits
from swift_ft.torch_adapters.step_failures import step_failures


@pytest.fixture(autouse=True)
def begun() -> Iterator[None]:
    step_failures.begin()
    yield
    step_failures.begin()


def a_step(on_device: Callable[[], str | None] = lambda: None) -> Step:
    batches: Any = SimpleNamespace(end=lambda: None)
    return Step(
        3, False, batches, lambda error: isinstance(error, ConnectionError), ScriptPhases(), on_device
    )


def test_a_step_without_an_error_is_complete() -> None:
    with (step := a_step()):
        pass
    assert (step._left, step._cause) == (True, None)


@pytest.mark.parametrize("error", [None, ValueError("its own words"), KeyError("loss")])
def test_a_failure_interrupts_it_whatever_the_script_raises(error: Exception | None) -> None:
    with (step := a_step()):
        step_failures.broken("Connection closed by peer")
        if error is not None:
            raise error
    assert (step._left, step._cause, step.caught) == (False, "Connection closed by peer", True)


def test_what_fails_on_the_device_interrupts_it() -> None:
    with (step := a_step(on_device=lambda: "the group was aborted")):
        pass
    assert (step._left, step._cause, step.caught) == (False, "the group was aborted", False)


def test_the_device_is_not_asked_after_an_error() -> None:
    asked = []
    with pytest.raises(ValueError, match="its own"), a_step(on_device=lambda: asked.append(1)):
        raise ValueError("its own")
    assert not asked


def test_an_error_that_reaches_the_end_is_not_caught() -> None:
    with (step := a_step()):
        step_failures.broken("Connection closed by peer")
        raise ConnectionError("Connection closed by peer")
    assert (step._left, step.caught) == (False, False)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (KeyboardInterrupt(), None),
        (SystemExit(1), "Connection closed by peer"),
        (SystemExit(), "Connection closed by peer"),
    ],
    ids=repr,
)
def test_what_ends_a_process_leaves_the_block(error: BaseException, cause: str | None) -> None:
    """An exit is not suppressed, and the step is interrupted all the same."""
    step_failures.broken("Connection closed by peer")
    step = a_step()
    with pytest.raises(type(error)), step:
        raise error
    assert (step._left, step._cause) == (False, cause)


def test_an_exit_in_place_of_the_error_leaves_it_too() -> None:
    step = a_step()
    with pytest.raises(SystemExit), step:
        raise SystemExit(0) from ConnectionError("Connection closed by peer")
    assert not step._left


def test_an_exit_without_a_failure_is_the_scripts() -> None:
    step = a_step()
    with pytest.raises(SystemExit), step:
        sys.exit(0)
    assert (step._left, step._cause) == (False, None)


def test_an_end_at_a_signal_does_not_come_of_the_failure() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
    step_failures.broken("Connection closed by peer")
    step = a_step()
    try:
        with pytest.raises(SystemExit), step:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (step._left, step._cause) == (False, None)


@pytest.mark.parametrize("raised", [None, ValueError("its own words")])
def test_a_replay_that_has_failed_is_not_complete(raised: Exception | None) -> None:
    failure = DivergenceError("other bits")
    with (step := a_step()):
        step_failures.note(failure)
        if raised is not None:
            raise raised
    assert (step._left, step._failure) == (False, failure)


def test_a_mistake_that_the_script_has_caught_is_raised_again() -> None:
    with pytest.raises(UsageError, match="another batch"), a_step():
        step_failures.note(UsageError("another batch"))


def test_so_is_one_for_which_it_exits() -> None:
    step_failures.note(UsageError("another batch"))
    with pytest.raises(UsageError, match="another batch"), a_step():
        sys.exit(0)


def test_an_error_of_the_script_leaves_the_block() -> None:
    with pytest.raises(ValueError, match="a fault"), a_step():
        raise ValueError("a fault")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the loss is not finite"),
        MemoryError("of a size that was to be received"),
        DivergenceError("other bits"),
        UsageError("another batch"),
        SystemExit("the loss is not finite"),
    ],
    ids=repr,
)
def test_nothing_follows_from_what_an_abort_has_left(error: BaseException, waits: AbortableWaits) -> None:
    """Over NCCL no wait fails: the script reads any number, and says what it thinks of it."""
    with (step := a_step()):
        waits.abort()
        raise error
    assert (step._left, step._cause, step._failure, step.caught) == (False, ABORTED, None, False)


@pytest.mark.parametrize("error", [DivergenceError("other bits"), UsageError("another batch")], ids=repr)
def test_nor_from_what_the_script_has_caught(error: Exception, waits: AbortableWaits) -> None:
    with (step := a_step()):
        waits.abort()
        step_failures.note(error)
    assert (step._left, step._cause, step._failure) == (False, ABORTED, None)


def test_it_may_have_updated_before_with_gradients_of_its_own(waits: AbortableWaits) -> None:
    with (step := a_step()):
        waits.abort()
        step_failures.broken("Connection closed by peer")
        raise ValueError("its own words")
    assert (step._cause, step.caught) == (ABORTED, True)


@pytest.mark.parametrize(
    ("error", "cause"), [(KeyboardInterrupt(), None), (SystemExit(0), ABORTED)], ids=repr
)
def test_an_end_that_blames_nothing_leaves_the_block_after_an_abort_too(
    error: BaseException, cause: str | None, waits: AbortableWaits
) -> None:
    waits.abort()
    step = a_step()
    with pytest.raises(type(error)), step:
        raise error
    assert (step._left, step._cause) == (False, cause)


def test_an_error_of_what_was_there_before_the_abort_is_the_scripts(waits: AbortableWaits) -> None:
    waits.unawaited = False  # as after an update
    waits.abort()
    with pytest.raises(ValueError, match="a fault"), a_step():
        raise ValueError("a fault")
