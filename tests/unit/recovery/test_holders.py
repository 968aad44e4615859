"""Which machine holds the keys of another one."""

from __future__ import annotations

from swift_ft.recovery import events as ev
from swift_ft.recovery.holders import fenced_between, holder_of
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step_all


def job(machines: int, *joined: ev.MachineJoined) -> State:
    return step_all(State(), [ev.JobOpened(machines=machines), *joined])


def machine(name: str, host: str = "") -> ev.MachineJoined:
    return ev.MachineJoined(machine=name, address=f"{name}:1", host=host)


def test_members_form_a_ring_and_spares_have_the_first_member() -> None:
    state = job(3, *(machine(name) for name in ("a", "b", "c", "spare")))
    assert [holder_of(state, name) for name in ("a", "b", "c", "spare")] == ["b", "c", "a", "a"]
    assert [name for name in "abc" if state.membership.first == name] == ["a"]


def test_an_empty_slot_is_passed_over() -> None:
    state = step_all(
        job(3, *(machine(name) for name in "abc")), [ev.MachineLost(machine="b", reason="killed")]
    )
    assert holder_of(state, "a") == "c"
    assert fenced_between(State(), state) == ["b"]
    assert fenced_between(state, state) == []


def test_a_single_machine_has_a_spare_or_none() -> None:
    assert holder_of(job(1, machine("a")), "a") is None
    assert holder_of(job(1, machine("a"), machine("spare")), "a") == "spare"


def test_a_guest_is_not_held_on_its_own_host() -> None:
    """They are lost together."""
    state = job(3, machine("a"), machine("guest", host="a"), machine("c"))
    assert holder_of(state, "a") == "c"
    assert holder_of(state, "guest") == "c"
    assert holder_of(state, "c") in ("a", "guest")
