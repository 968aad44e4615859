"""Which workers count as stopped, by what the kernel says of their processes."""

from __future__ import annotations

import pytest

from swift_ft.launch.detection.stopped_workers import LOOKS, StoppedWorkers

LIMIT_S = 1.0
PIDS = {0: 100, 1: 101}


class Kernel:
    """Time, and the states of processes."""

    def __init__(self) -> None:
        self.now = 50.0
        self.states = {100: "R", 101: "S"}
        self.stopped = StoppedWorkers(lambda: self.now, self.states.__getitem__)

    def found_within(self, seconds: float, *, age_s: float = 60.0, every_s: float = 0.1) -> list[int]:
        """Those that are found while the agent looks again and again for some time."""
        end = self.now + seconds
        found: set[int] = set()
        while self.now < end:
            self.now += every_s
            found.update(self.stopped.look(PIDS, {0: age_s, 1: age_s}, LIMIT_S))
        return sorted(found)


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def test_one_that_is_stopped_is_found_within_the_limit(kernel: Kernel) -> None:
    assert kernel.found_within(5.0) == []
    kernel.states[101] = "T"
    assert kernel.found_within(LIMIT_S / 2) == []
    assert kernel.found_within(LIMIT_S / 2) == [1]


def test_one_that_goes_on_in_between_is_not(kernel: Kernel) -> None:
    for _ in range(5):
        kernel.states[101] = "T"
        assert kernel.found_within(LIMIT_S / 2) == []
        kernel.states[101] = "R"
        assert kernel.found_within(LIMIT_S / LOOKS) == []


def test_a_stop_that_was_told_is_looked_at_at_once(kernel: Kernel) -> None:
    """Without it, the next look would come with the next event of any kind."""
    assert kernel.found_within(LIMIT_S / LOOKS) == []
    assert not kernel.stopped.some
    kernel.states[101] = "T"
    kernel.stopped.look(PIDS, {0: 60.0, 1: 60.0}, LIMIT_S)
    assert not kernel.stopped.some
    kernel.stopped.tell()
    kernel.stopped.look(PIDS, {0: 60.0, 1: 60.0}, LIMIT_S)
    assert kernel.stopped.some


def test_one_that_was_heard_meanwhile_is_not(kernel: Kernel) -> None:
    kernel.states[101] = "T"
    assert kernel.found_within(5.0, age_s=0.05) == []


def test_a_debugger_may_stop_a_worker(kernel: Kernel) -> None:
    kernel.states[101] = "t"
    assert kernel.found_within(5.0) == []


def test_an_agent_that_was_frozen_itself_begins_anew(kernel: Kernel) -> None:
    kernel.states[101] = "T"
    assert kernel.found_within(3 * LIMIT_S, every_s=0.6 * LIMIT_S) == []
