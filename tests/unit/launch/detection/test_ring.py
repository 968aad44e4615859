"""The ring of agents: whom each watches, and how often it looks."""

from __future__ import annotations

from swift_ft.launch.detection.ring import Ring
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.protocol import step

MACHINES = 4


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def joined(machines: int) -> State:
    state = step(State(), ev.JobOpened(machines=MACHINES))
    for number in range(machines):
        state = step(state, ev.MachineJoined(machine=f"m{number}", address=f"m{number}:1"))
    return state


def test_a_job_that_forms_is_looked_at_the_more_rarely_the_larger_it_is() -> None:
    clock = Clock()
    ring = Ring(clock)
    watch = ring.news(joined(2), "m0")
    assert watch is not None
    assert watch.machines == {"m1": "m1:1"}
    assert ring.news(joined(3), "m0") is None
    clock.now += 0.01
    watch = ring.news(joined(3), "m0")
    assert watch is not None
    assert list(watch.machines) == ["m1", "m2"]


def test_once_it_has_formed_each_change_counts_at_once() -> None:
    ring, formed = Ring(Clock()), joined(MACHINES)
    assert formed.phase != Phase.FORMING
    assert ring.news(joined(2), "m0") is not None
    watch = ring.news(formed, "m0")
    assert watch is not None
    assert list(watch.machines) == ["m1", "m2", "m3"]
    assert ring.news(formed, "m0") is None
    lost = ring.news(step(formed, ev.MachineLost(machine="m1", reason="?")), "m0")
    assert lost is not None
    assert list(lost.machines) == ["m2", "m3"]
