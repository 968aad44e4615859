"""Heads follow from the state alone, so all machines agree on them, and none passes events on in a circle."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from immutables import Map

from swift_ft.recovery.heads import FANOUT, levels_of, met_by, served_by, upstream_of
from swift_ft.recovery.job_state import JobShape, State
from swift_ft.recovery.membership import Membership, Spare


def state_of(machines: int, empty: frozenset[int] = frozenset()) -> State:
    filled = {slot: f"m{slot}" for slot in range(machines) if slot not in empty}
    names = {name: slot for slot, name in filled.items()}
    membership = Membership(
        members=Map(filled), slots=Map(names), addresses=Map({name: f"{name}:1" for name in names})
    )
    return replace(State(), shape=JobShape(machines), membership=membership)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[State, int]:
    """A job with empty slots, alone or whole ranges of them, and the fanout of its heads."""
    machines = draw(st.one_of(st.integers(1, 200), st.integers(1, 20_000)))
    fanout = draw(st.sampled_from([2, 3, 8, FANOUT]))
    empty = set(draw(st.lists(st.integers(0, machines - 1), max_size=20)))
    for start in draw(st.lists(st.integers(0, machines - 1), max_size=3)):
        empty |= set(range(start, min(machines, start + draw(st.integers(1, 1200)))))
    return state_of(machines, frozenset(empty)), fanout


def slots_above(state: State, machine: str, fanout: int) -> list[int]:
    """The machines that a machine's events pass, as slots, until they reach the store."""
    above: list[int] = []
    at: str | None = machine
    while at is not None and (at := upstream_of(state, at, (), fanout)) is not None:
        above.append(state.membership.slots[at])
        assert len(above) <= 20, "a circle"
    return above


@given(jobs())
@settings(max_examples=40, deadline=None)
def test_each_machine_reaches_the_store_and_few_go_there_themselves(job: tuple[State, int]) -> None:
    state, fanout = job
    levels = levels_of(state.shape.machines, fanout)
    at_the_store = 0
    below: dict[str, int] = {}
    for machine, slot in state.membership.slots.items():
        above = slots_above(state, machine, fanout)
        assert len(above) <= levels
        assert above == sorted(above, reverse=True)
        assert not above or above[0] < slot
        upstream = upstream_of(state, machine, (), fanout)
        at_the_store += upstream is None
        if upstream is not None:
            below[upstream] = below.get(upstream, 0) + 1
    assert at_the_store <= (1 if levels else fanout)
    assert max(below.values(), default=0) <= (fanout - 1) * max(1, levels)


@given(jobs())
@settings(max_examples=20, deadline=None)
def test_a_machine_serves_the_slots_whose_events_pass_it(job: tuple[State, int]) -> None:
    state, fanout = job
    passed: dict[int, set[int]] = {}
    for machine, slot in state.membership.slots.items():
        for at in [slot, *slots_above(state, machine, fanout)]:
            passed.setdefault(at, set()).add(slot)
    for machine, slot in state.membership.slots.items():
        served = served_by(state, machine, (), fanout)
        assert passed[slot] == {other for other in served if other in state.membership.members}


@given(jobs(), st.data())
@settings(max_examples=40, deadline=None)
def test_whatever_each_suspects_there_is_no_circle(job: tuple[State, int], data: st.DataObject) -> None:
    """Each machine on the way may suspect others than the machine before it."""
    state, fanout = job
    names = sorted(state.membership.slots, key=state.membership.slots.__getitem__)
    if not names:
        return
    at: str | None = data.draw(st.sampled_from(names))
    slot = state.membership.slots[at or ""]
    for _ in range(20):
        assert at is not None
        suspected = data.draw(st.sets(st.sampled_from(names[:50]), max_size=5))
        at = upstream_of(state, at, suspected, fanout)
        if at is None:
            return
        assert at not in suspected
        assert state.membership.slots[at] < slot
        slot = state.membership.slots[at]
    raise AssertionError("the store is not reached")


def test_a_small_job_has_no_heads() -> None:
    state = state_of(FANOUT)
    assert all(upstream_of(state, machine) is None for machine in state.membership.slots)
    assert levels_of(FANOUT) == 0
    assert levels_of(FANOUT + 1) == 2
    assert levels_of(10_000) == 3


def test_the_next_machine_is_the_head_once_the_first_is_lost_or_suspected() -> None:
    state = state_of(64)
    assert upstream_of(state, "m40") == "m32"
    assert upstream_of(state, "m40", {"m32"}) == "m33"
    assert upstream_of(state_of(64, frozenset({32})), "m40") == "m33"
    assert upstream_of(state, "m33", {"m32"}) == "m0"
    assert served_by(state, "m33", {"m32"}) == range(33, 64)


def with_spares(state: State, spares: int, first: int = 0) -> State:
    added = {f"s{number}": Spare(number, None) for number in range(first, first + spares)}
    return replace(state, membership=replace(state.membership, spares=Map(added)))


def test_a_machine_that_has_not_joined_goes_to_the_store() -> None:
    assert upstream_of(state_of(64), "newcomer") is None
    assert served_by(state_of(64), "newcomer") == range(0)


def test_spares_spread_over_the_heads_of_groups() -> None:
    state = with_spares(state_of(100), 8, first=100)
    heads = Counter(upstream_of(state, f"s{number}") for number in range(100, 108))
    assert heads == {"m0": 2, "m32": 2, "m64": 2, "m96": 2}
    assert upstream_of(state, "s100", {"m0"}) == "m1"
    assert served_by(state, "s100") == range(0)


def test_a_spare_goes_to_any_member_where_its_group_is_empty_and_to_the_store_where_no_slot_is_filled() -> (
    None
):
    assert upstream_of(with_spares(state_of(64, frozenset(range(32))), 1), "s0") == "m32"
    assert upstream_of(with_spares(state_of(64, frozenset(range(64))), 1), "s0") is None
    assert upstream_of(with_spares(state_of(FANOUT), 1), "s0") is None


@given(st.integers(0, 100_000), st.integers(2, FANOUT))
def test_each_ticket_leads_to_the_first_one_in_few_steps(ticket: int, fanout: int) -> None:
    steps, at = 0, ticket
    while (above := met_by(at, fanout)) is not None:
        assert 0 <= above < at
        steps, at = steps + 1, above
    assert at == 0
    assert fanout**steps <= max(1, ticket) * fanout


def test_no_machine_is_met_by_more_than_the_fanout() -> None:
    met = Counter(met_by(ticket) for ticket in range(10_000))
    assert met.pop(None) == 1
    assert max(met.values()) == FANOUT


def test_a_member_that_has_left_in_the_end_is_no_head() -> None:
    """Its script had exited, so it keeps its slot; it has no address any more."""
    state = state_of(64)
    membership = replace(state.membership, addresses=state.membership.addresses.delete("m32"))
    assert upstream_of(replace(state, membership=membership), "m40") == "m33"
