"""Which machine leaves first when a run goes on with fewer."""

from __future__ import annotations

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step
from swift_ft.recovery.scaling import leaves_next, machines_of
from tests.support.journals import machine


def run_of(slots: int, arrivals: int) -> State:
    """A job that has formed."""
    state = step(State(), ev.JobOpened(machines=slots))
    for number in range(arrivals):
        state = step(state, ev.MachineJoined(machine=machine(number), address=f"host{number}:1"))
    return state


def test_who_waits_leaves_before_who_trains() -> None:
    state = run_of(2, 4)
    assert machines_of(state) == [machine(number) for number in range(4)]
    assert leaves_next(state) == machine(3)


def test_the_last_slot_leaves_first() -> None:
    assert leaves_next(run_of(3, 3)) == machine(2)


def test_a_guest_is_no_machine_and_its_host_stays_longer() -> None:
    state = step(run_of(3, 3), ev.MachineLost(machine=machine(1), reason="power"))
    guest = ev.MachineJoined(machine="guest.0", address="host2:2", preferred_slot=1, host=machine(2))
    state = step(state, guest)
    assert "guest.0" in state.membership.members.values()
    assert machines_of(state) == [machine(0), machine(2)]
    assert leaves_next(state) == machine(0), "machine 2 runs two slots"
