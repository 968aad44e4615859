"""Which machine asks the scheduler, for which slots, and that no loss is asked for twice."""

from __future__ import annotations

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step, step_all
from swift_ft.recovery.requests import slots_without_machine, to_request
from tests.support.journals import checkpoint, machine, opening

SETUP = ("torch: 2",)


def lost(number: int) -> ev.MachineLost:
    return ev.MachineLost(machine=machine(number), reason="power")


def joined(name: str, host: str = "", slot: int | None = None) -> ev.MachineJoined:
    return ev.MachineJoined(machine=name, address=f"{name}:1", setup=SETUP, host=host, preferred_slot=slot)


def begun(spares: int = 0) -> State:
    return step_all(State(), [*opening(3, spares=spares), *checkpoint(3, 10)])


def test_the_machine_in_the_lowest_slot_asks_for_an_empty_one() -> None:
    state = step(begun(), lost(1))
    assert to_request(state, machine(0)) == (1,)
    assert to_request(state, machine(2)) == ()
    assert to_request(step(state, lost(0)), machine(2)) == (0, 1)


def test_nobody_is_asked_for_while_all_slots_are_filled_or_a_spare_waits() -> None:
    assert slots_without_machine(begun()) == ()
    assert slots_without_machine(step(begun(1), lost(1))) == ()
    assert slots_without_machine(step_all(begun(1), [lost(1), lost(2)])) == (2,)
    asked_to_leave = ev.DrainRequested(machine=machine(3))
    assert slots_without_machine(step_all(begun(1), [lost(1), lost(2), asked_to_leave])) in ((1, 2), (2,))


def test_a_job_that_has_not_begun_or_has_ended_asks_for_nobody() -> None:
    assert slots_without_machine(step_all(State(), opening(3)[:3])) == ()
    assert slots_without_machine(step_all(begun(), [lost(1), ev.JobClosed(reason="over")])) == ()


def test_a_slot_is_asked_for_once() -> None:
    state = step_all(begun(), [lost(1), ev.MachinesRequested(machine=machine(0), slots=(1,))])
    assert to_request(state, machine(0)) == ()
    # Another machine takes over from the one that asked, and asks for that one only.
    state = step(state, lost(0))
    assert to_request(state, machine(2)) == (0,)
    again = step(state, ev.MachinesRequested(machine=machine(2), slots=(0, 1)))
    assert dict(again.membership.requested) == {0: machine(2), 1: machine(0)}


def test_a_guest_fills_no_slot_for_good() -> None:
    state = step_all(begun(), [lost(1), joined("guest.0", machine(2), 1)])
    assert state.membership.members[1] == "guest.0"
    assert to_request(state, machine(0)) == (1,)
    state = step(state, ev.MachinesRequested(machine=machine(0), slots=(1,)))
    assert to_request(state, machine(0)) == ()
    # The guest goes with its host, and its slot was asked for already.
    state = step(state, lost(2))
    assert to_request(state, machine(0)) == (2,)


def test_a_guest_does_not_ask() -> None:
    state = step_all(begun(), [lost(0), joined("guest.0", machine(2), 0)])
    assert state.membership.members[0] == "guest.0"
    assert to_request(state, "guest.0") == ()
    assert to_request(state, machine(1)) == (0,)


def test_a_slot_that_was_filled_since_is_another_loss() -> None:
    asked = ev.MachinesRequested(machine=machine(0), slots=(1,))
    state = step_all(begun(), [lost(1), asked, joined("new.0")])
    assert state.membership.members[1] == "new.0"
    assert not state.membership.requested
    state = step(state, ev.MachineLost(machine="new.0", reason="power"))
    assert to_request(state, machine(0)) == (1,)


def test_a_request_for_what_is_not_missing_counts_for_nothing() -> None:
    state = step_all(begun(), [lost(1), ev.MachinesRequested(machine=machine(0), slots=(0, 1, 2))])
    assert dict(state.membership.requested) == {1: machine(0)}
    assert step(state, ev.MachinesRequested(machine="stranger", slots=(1,))) is state
