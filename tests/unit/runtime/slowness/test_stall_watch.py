"""An iteration that does not end: after how long it is announced, and how the script's place is named."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from swift_ft.coordination.progress import Stand
from swift_ft.runtime.slowness.part import StallWatch
from swift_ft.torch_adapters.abortable_waits import AbortableWaits


class Script:
    """A thread that trains: it stands still in a function until the test is over."""

    def __init__(self) -> None:
        self.stands, self.over = threading.Event(), threading.Event()

    def load_batch(self) -> None:
        self.stands.set()
        self.over.wait(60)

    def receive(self) -> None:
        AbortableWaits().call_or_abort(self.load_batch, timeout_s=60)

    def run(self, function: Callable[[], None]) -> int:
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        assert self.stands.wait(30)
        assert thread.ident is not None
        return thread.ident


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    yield script
    script.over.set()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[StallWatch, float], str]:
    """What a watch says when it looks at a time."""

    def at(watch: StallWatch, now: float) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO, "swift_ft"):
            watch.look(now)
        return "\n".join(caplog.messages)

    return at


def watch_after_two(thread: int, seconds: float) -> StallWatch:
    """Two iterations have taken so long each, and the third one begins at the time 0."""
    watch = StallWatch(2, thread)
    for number, begun in enumerate((-2 * seconds, -seconds, 0.0)):
        watch.begin(55 + number, begun)
    return watch


def test_where_the_script_is(script: Script, said: Callable[[StallWatch, float], str]) -> None:
    watch = watch_after_two(script.run(script.load_batch), 1.3)
    assert said(watch, 9.9) == ""
    told = said(watch, 10.5)
    assert told.startswith("worker 2 has been in iteration 57 for 10.5 s; the longest before took 1.30 s. ")
    assert "Its script is at test_stall_watch.py:" in told
    assert "(load_batch), in threading.wait" in told
    assert said(watch, 11.5) == ""  # ever less often
    assert said(watch, 20.0).startswith("worker 2 has been in iteration 57 for 20.0 s")


def test_it_goes_on(
    script: Script, said: Callable[[StallWatch, float], str], caplog: pytest.LogCaptureFixture
) -> None:
    watch = watch_after_two(script.run(script.load_batch), 1.0)
    said(watch, 12.0)
    with caplog.at_level(logging.INFO, "swift_ft"):
        watch.begin(58, 64.0)
    assert caplog.messages[-1] == "worker 2 goes on with iteration 58 after 64.0 s"
    assert said(watch, 64.0 + 300.0) == ""  # five times as long as the longest
    assert said(watch, 64.0 + 330.0)


def test_iterations_that_always_take_long(script: Script, said: Callable[[StallWatch, float], str]) -> None:
    watch = watch_after_two(script.run(script.load_batch), 40.0)
    assert said(watch, 190.0) == ""
    assert "the longest before took 40.0 s" in said(watch, 350.0)


def test_the_first_iteration_may_compile(script: Script, said: Callable[[StallWatch, float], str]) -> None:
    watch = StallWatch(0, script.run(script.load_batch))
    watch.begin(0, 0.0)
    assert said(watch, 45.0) == ""
    assert said(watch, 81.0).startswith("worker 0 has been in iteration 0 for 81.0 s. Its script is ")


def test_who_waits_for_others_speaks_later(script: Script, said: Callable[[StallWatch, float], str]) -> None:
    """The one that all others wait for speaks first."""
    watch = watch_after_two(script.run(script.receive), 1.0)
    assert said(watch, 45.0) == ""
    assert said(watch, 81.0).endswith("and waits for other workers")


@pytest.mark.parametrize("seconds", [1.0, 9.0, 15.0])
def test_where_it_is_is_told_before_it_is_announced(
    script: Script, said: Callable[[StallWatch, float], str], seconds: float
) -> None:
    """The worker that says where all are must have heard of the others by then."""
    stands: list[Stand] = []
    watch = StallWatch(2, script.run(script.load_batch), stands.append)
    for number, begun in enumerate((-seconds, 0.0)):
        watch.begin(55 + number, begun)
    announced = [now for now in (10.5, 20.5, 40.5, 80.5) if said(watch, now)]
    assert announced == [now for now in (10.5, 20.5, 40.5, 80.5) if now > 5 * seconds]
    assert [stand.iteration for stand in stands] == [56] * 4


def test_a_recovery_has_announcements_of_its_own(
    script: Script, said: Callable[[StallWatch, float], str]
) -> None:
    watch = watch_after_two(script.run(script.load_batch), 1.0)
    watch.pause()
    assert said(watch, 500.0) == ""
    watch.begin(57, 600.0)  # what passed meanwhile was no iteration
    assert "the longest before took 1.00 s" in said(watch, 611.0)
